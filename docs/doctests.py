"""For mkdocstrings: examples of docstrings (`>>>`) are code, where Markdown would see quotations."""

import re

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around each run of lines from `>>>` to the next empty one."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            fenced = r"```pycon\n\g<0>\n```"
            obj.docstring.value = re.sub(r"(?m)^>>> .*(?:\n.+)*", fenced, obj.docstring.value)
