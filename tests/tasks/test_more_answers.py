"""Right and wrong answers in the notations that models and data sets use beside the plain ones."""

import pytest

from jaxrl_llm.tasks.math.check import Verdict

RIGHT = (
    (r"5\text{ million}", "5000000"),
    (r"(1)(3)(4)", "(1), (3), (4)"),
    (r"2^{n-1}(n+1)", "(n+1)2^{n-1}"),
    (r"n \cdot 2^{n-1}", r"n2^{n-1}"),
    (r"36\pi \cdot 2^{2/3}", r"36\pi 2^{2/3}"),
    (r"\binom{n}{2} + 1", r"\frac{n(n-1)}{2}+1"),
    ("n^2-n+1", "n(n-1)+1"),
    (r"\frac{3 + \sqrt{41} + 2\sqrt{11}}{4}", r"\frac{3+\sqrt{41}}{4}+\frac{\sqrt{11}}{2}"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\dfrac13 \\[4pt] \dfrac23 \end{pmatrix}"),
    (r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}", r"\left(\begin{array}{c}-7\\16\end{array}\right)"),
    (r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}", r"\left[\begin{array}{r}-7\\16\end{array}\right]"),
    (r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}", r"\begin{psmallmatrix}-7\\16\end{psmallmatrix}"),
    ("4 : 13", r"\frac{4}{13}"),
    (r"\frac{4}{13}", "4:13"),
    ("6:00", "6{:}00"),
    ("3:30 PM", r"3{:}30\text{ PM}"),
    ("4:3", r"4\colon 3"),
    ("15:20", r"15\text{:}20"),
    ("II", r"\text{II}"),
    (r"\text{IV}", "IV"),
    ("12", r"12^{\text{th}}"),
    ("12", r"12^{\text{th}} \text{ grade}"),
    ("12", r"12^\circ\text{F}"),
    (r"30^\circ", r"30^\circ\mathrm{C}"),
    (r"\frac{1+\sqrt3}{2}", r"\frac{1}{2}\left[1+\sqrt3\right]"),
    (r"\left\lceil\frac{n}{2}\right\rceil", r"\lceil n/2\rceil"),
    ("2516_8", "(2516)_8"),
    ("2516_8", r"2516_{\text{eight}}"),
    ("2516_8", r"2516_{\text{base }8}"),
    ("2516_8", r"2516\text{ (base 8)}"),
    ("10110_{(2)}", "(10110)_2"),
    ("ABC_{16}", r"\text{ABC}_{16}"),
    *(("12", rf"12\text{{ {unit}}}") for unit in (
        "yr", "mo", "wk", "qt", "pt", "of them", "ft-lb", "light-years", "man-hours", "o'clock",
        "ordered pairs", "times",
    )),
    (r"24 \text{ km}", r"24\text{ kilometres}"),
    ("50", r"50\,\mathrm{J\cdot mol^{-1}}"),
    (r"7\times 10^{37}", r"7\times 10^{37}\,\mathrm{erg\,s^{-1}}"),
    ("50", r"50\,\mu\text{m}"),
    ("50", r"50\,\Omega"),
    ("12", r"12\,{\rm cm}"),
    ("12", r"12\textup{ cm}"),
    (r"15\mbox{ cm}^2", "15 cm²"),
    (r"15\mbox{ cm}^2", r"15\text{ cm²}"),
    (r"50\%", r"50\text{\%}"),
    ("[1,2]", r"\bigg[1,2\bigg]"),
    (r"\arctan 2", r"\operatorname{arctan} 2"),
    (r"\cot x", r"\mathrm{cot}\,x"),
    ("K_{eq}", r"K_{\text{eq}}"),
    ("10", "m+n=10"),
    ("5", r"\ell = 5"),
    (r"\ell = 5", "5"),
    ("5", r"\max = 5"),
    ("5", r"5\text{ ac}"),
    ("10", "|AB|=10"),
    ("10", r"\overline{AB}=10"),
    ("10", "f(-2)=10"),
    ("10", "[ABC]=10"),
    (r"36^\circ", r"m\angle ABC = 36^\circ"),
    (r"\frac12", r"\frac{1}{2}\approx 0.5"),
    ("1,-2", r"1\text{, }-2"),
    ("(3,-1)", r"\left( {3, - 1} \right)"),
    (r"(-\infty,\infty)", r"\mathbb{R}"),
    (r"k \neq 1", r"k \not= 1"),
    ("10", r"{\bf 10}"),
    (r"\frac12", r"{1 \over 2}"),
    (r"\text{(B)}", r"\text{B)}"),
    ("C", r"\text{C.}"),
    ("(2,1)", "y=1,x=2"),
    (r"\left(2,\frac{\pi}{2}\right)", r"r=2,\theta=\frac{\pi}{2}"),
    ("x=1,x=2", "2,1"),
)  # fmt: skip
WRONG = (
    (r"5\text{ million}", "5"),
    (r"5\text{ thousand dollars}", "5"),
    (r"2\text{ dozen}", "2"),
    ("g(0)", "0"),
    ("g(1)", "g"),
    ("(1)(3)(4)", "12"),
    (r"\frac{\pi}{2}", r"\frac{\pi}{2}^\circ"),
    ("1,000", "1,0"),
    ("x=1, y=2", "2,1"),
    ("ABC_{16}", "BAC_{16}"),
    ("5", r"\text{-x}=5"),
    ("5", r"\text{isn't}=5"),
    ("5", r"\text{minus x}=5"),
    ("5", r"\text{half}=5"),
    ("II", "I^2"),
    ("2516_8", r"2516_{\text{nine}}"),
    ("2516_8", "2516_7"),
    ("2516_8", "(2517)_8"),
    ("4:13", "13:4"),
    ("4:13", r"\frac{13}{4}"),
    ("(2,1)", "x=1,y=2"),
    ("(2,1)", "y=2,x=1"),
    ("x+3", "(x+1)+2"),
    ("x^2+2x", "x(x+1)+x"),
    ("12", r"12\text{ pairs}"),
    ("12", r"12\text{ times ten}"),
    ("12", "12^{2}"),
    (r"\frac12", r"\frac13\approx 0.5"),
    ("5", "[5]+"),
    (r"\lceil n/2\rceil", r"\lfloor n/2\rfloor"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\left(\begin{array}{cc}1&2\end{array}\right)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\[4pt] 1 \end{pmatrix}"),
    ("(0,1)", r"\mathbb{R}"),
    ("10", "m-n=10+1"),
)


@pytest.mark.parametrize(("truth", "answer"), RIGHT)
def test_right(checker, truth, answer):
    assert checker.check(truth, answer) is Verdict.EQUAL


@pytest.mark.parametrize(("truth", "answer"), WRONG)
def test_wrong(checker, truth, answer):
    assert checker.check(truth, answer) is Verdict.DIFFERENT


LINE = "What is the equation of the line?"


@pytest.mark.parametrize(
    ("question", "truth", "answer", "verdict"),
    [
        (LINE, "2x-3y=0", r"y=\frac{2}{3}x", Verdict.EQUAL),
        (LINE, "2x-3y=0", "2x=3y", Verdict.EQUAL),
        (LINE, "2x-3y=0", "3y-2x=0", Verdict.EQUAL),
        (LINE, "5x - 7y + 11z + 4 = 0", "5x-7y+11z=-4", Verdict.EQUAL),
        (LINE, "y = 2x - 13", "2x-y=13", Verdict.EQUAL),
        (LINE, "y = 2x - 13", "4x-2y-26=0", Verdict.EQUAL),
        (LINE, "x^2+y^2=4", r"\frac{x^2}{4}+\frac{y^2}{4}=1", Verdict.EQUAL),
        (LINE, "y = 2x - 13", "2x-y=12", Verdict.DIFFERENT),
        (LINE, "y = 2x - 13", "x-y=13", Verdict.DIFFERENT),
        (LINE, "y = 2x - 13", "y-x=x-13", Verdict.DIFFERENT),
        (LINE, "y = 2x - 13", "(y-2x+13)^2=0", Verdict.DIFFERENT),
        (LINE, "x=5", "2x=10", Verdict.DIFFERENT),
        (LINE, "5", "2x=10", Verdict.DIFFERENT),
        (
            "Write the equation in slope-intercept form.",
            "y = 2x - 13",
            "2x-y=13",
            Verdict.DIFFERENT,
        ),
        ("Solve the equation for $y$.", "y = 2x - 13", "2x-y=13", Verdict.DIFFERENT),
        (
            "What is the equation of the line $2x=y+13$?",
            "y = 2x - 13",
            "2x=y+13",
            Verdict.DIFFERENT,
        ),
    ],
)
def test_equations_of_curves(checker, question, truth, answer, verdict):
    assert checker.check(truth, answer, question) is verdict
