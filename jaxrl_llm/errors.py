"""The one exception that is written for people: a single line, exit code 2, nothing half done."""


class UserError(Exception):
    """Something outside the program is wrong: the message says what, where, and what to do."""
