"""Which written answers are right: honest forms of the truth are, and questions restated are not."""
# ruff: noqa: RUF001 (letters and digits of other alphabets are among the answers)

import time

import pytest

from jaxrl_llm.tasks.math.expression import UnreadableError, parse
from jaxrl_llm.tasks.math.grade import operations, read
from jaxrl_llm.tasks.math.worker import Verdict
from tests.tasks import notations

RIGHT = (
    ("2<x<5", "5>x>2"),
    (r"5\text{ cm}^3", r"5\text{ cubic centimeters}"),
    ("2i", r"2\mathrm{i}"),
    ("3+4i", r"3+4\mathrm{i}"),
    ("e^2", r"\mathrm{e}^2"),
    (r"\arctan 2", r"\tan^{-1} 2"),
    (r"\sin^{-1}\frac13", r"\arcsin\frac13"),
    ("50%", r"50\text{ per cent}"),
    ("5", r"5\text{ Hz}"),
    ("5", r"5\text{ N/m}"),
    ("5", r"\text{the area}=5"),
    ("5", r"\theta=5"),
    (r"5\text{ million}", r"5\text{M}"),
    (r"\frac{1}{2}", "0.5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1,000", "1000"),
    (r"50\%", r"50\%"),
    (r"50\%", "50"),
    ("5", "x=5"),
    ("5", r"5\text{ cm}"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"90^\circ", "90"),
    (r"137 \frac{1}{2}", "137.5"),
    (r"137 \frac{1}{2}", r"\frac{275}{2}"),
    (r"10,\!080", "10080"),
    ("58,500", "58500"),
    (r"\$32,\!348", "32348"),
    (r"\$18.90", "18.9"),
    ("1,-2", "-2, 1"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2,1-\sqrt5,1+\sqrt5"),
    (r"\text{(C)}", "C"),
    (r"\text{(C)}", "(C)"),
    ("C", r"\text{C}"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{bmatrix}0.2\\-3.6\end{bmatrix}"),
    ("2^{10}", "1024"),
    ("2^{10}", "2^{10}"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    (r"\frac{3\sqrt{3}}{4}", r"\frac34\sqrt3"),
    (r"11 \sqrt{5} + 11", r"11(\sqrt5+1)"),
    (r"\frac{\sqrt{3}}{3}", r"1/\sqrt{3}"),
    (r"3\sqrt{5}", r"\sqrt{45}"),
    ("6-5i", "-5i+6"),
    (r"15\mbox{ cm}^2", "15"),
    (r"864 \mbox{ inches}^2", r"864\text{ square inches}"),
    ("y = 2x + 3", "y=3+2x"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"),
    ("2516_8", "2516_{8}"),
    (r"8\!:\!34 \text{ p.m.}", "8:34 p.m."),
    (r"0.09 \text{ OR } \frac{9}{100}", "0.09"),
    (r"0.09 \text{ OR } \frac{9}{100}", r"\frac{9}{100}"),
    (r"18+2\pi", r"2(\pi+9)"),
    (r"\frac{11+9a}{20}", r"\frac{9a+11}{20}"),
    (r"\cot x", r"\cot(x)"),
    (r"\frac{20000}{\pi}", r"20000/\pi"),
    ("x=5", "5"),
    ("5x - 7y + 11z + 4 = 0", "5x+11z-7y+4=0"),
    (".35625", "0.35625"),
    (r"\frac{5}{\pi}", r"\frac{5}{\pi}."),
    (r"36\pi \cdot 2^{2/3}", r"36\pi\sqrt[3]{4}"),
    (r"8.43 \times 10^7", "84300000"),
    (r"8.43 \times 10^7", r"8.43\cdot10^{7}"),
    (r"7\pi", r"7 \pi \text{ units}"),
    ("C=10+3(P-1)", "C=10+3(P-1)"),
    ("e^{1/2}", r"\sqrt{e}"),
    ("5", "5"),
    ("-5", "−5"),
    (
        r"\frac{2\sqrt{5} + \sqrt{7} + 2}{23 + 4\sqrt{35}}",
        r"\frac{2+2\sqrt5+\sqrt7}{23+4\sqrt{35}}",
    ),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    ("-2 < x < 3", "3>x>-2"),
    (r"1+\ln 2", r"\ln(2)+1"),
    (r"\frac{32 \sqrt{3}}{9}", r"\frac{32}{3\sqrt3}"),
    (r"42x\sqrt{5x}", r"42\sqrt{5x}x"),
    (r"\binom{n}{2} + 1", r"1+\binom{n}{2}"),
    (r"\frac{B - A}{2}", "(B-A)/2"),
    (r"\frac{xy}{x-1}", r"\dfrac{yx}{x-1}"),
    (r"\frac{8}{4+x}", "8/(x+4)"),
    (r"\frac{9}{\pi^2}(\sqrt{3}+3)", r"\frac{9\sqrt3+27}{\pi^2}"),
    ("4.5e33", r"4.5\times10^{33}"),
    ("4.5e33", r"4.5 \cdot 10^{33}"),
    ("1e13", "10^{13}"),
    ("1e+16", "10000000000000000"),
    ("1.6e-19", r"1.6 \times 10^{-19}"),
    ("1.6e8", "160000000"),
    ("84300000", r"8.43\times10^7"),
    ("0.0015", r"1.5\times10^{-3}"),
    (r"2 \times 10^{-4}", "2e-4"),
    ("15,450", r"\{15,450\}"),
    ("15,450", r"15 \text{ and } 450"),
    ("15,450", "450, 15"),
    ("60, 120", "60,120"),
    ("12", r"12\text{ students}"),
    ("12", r"12 \text{ N}"),
    (r"\frac{14}{3}", r"\frac{14}{3}\text{ units}"),
    ("12", r"12\text{ m/s}"),
    ("12", r"12\mathrm{~km/s}"),
    ("12", r"12\text{ m}/\text{s}"),
    ("12", r"12\,\text{kg}\cdot\text{m}^2"),
    ("12", r"12\,\text{m}\,\text{s}^{-2}"),
    (r"-13.6 \text{ eV}", r"-13.6\text{ eV}"),
    ("2^{2/3}", r"\sqrt[3]{4}"),
    ("3^{1/2}", r"\sqrt3"),
    ("5^{6/5}", r"5\sqrt[5]{5}"),
    (r"2^{\frac78}", "2^{0.875}"),
    (r"\cos 20^\circ", r"\cos(20^\circ)"),
    (r"\cos 20^\circ + 1", r"1+\cos{20^\circ}"),
    ("e^{-x}", r"\frac{1}{e^x}"),
    ("x^{-1}", r"\frac1x"),
    (r"-\frac{1}{u^2}", "-u^{-2}"),
    (r"e^{-t/\tau}", r"\exp(-t/\tau)"),
    ("(1,2)", "x=1, y=2"),
    ("x=1, y=2", "(1,2)"),
    ("2", r"\{2\}"),
    (r"\{2\}", "2"),
    ("x>2", r"(2,\infty)"),
    (r"(-\infty, 3]", r"x \le 3"),
    ("[1,4)", r"1 \le x < 4"),
    (r"\text{No}", "No"),
    (r"\emptyset", r"\varnothing"),
    (r"\{\}", r"\emptyset"),
    (r"\frac16", r"0.1\bar{6}"),
    (r"0.\bar3", r"\frac13"),
    (r"\text{Yes}", "yes"),
    (r"I(0)e^{-t/\tau}", r"e^{-t/\tau}I(0)"),
    (r"2N\pi", r"N\cdot 2\pi"),
)
WRONG = (
    ("2<x<5", "2<x>5"),
    ("2<x<5", "5>x<2"),
    (r"1 \le x < 4", r"4>x\le 1"),
    ("x+3", "(x+1)+2"),
    ("x", "x^1"),
    ("x^6", "(x^2)^3"),
    (r"5 \text{ cm}^2", r"5\text{ cubic cm}"),
    ("5", r"\text{}"),
    ("5", r"x=\text{ }"),
    ("(5,1)", r"(\text{},1)"),
    ("5", r"5\mathrm{i}"),
    ("5", r"5\mathrm{e}"),
    ("5", r"5\mathbf{x}"),
    ("5", r"5\bm{i}"),
    ("5", r"5\mathrm{x}^2"),
    ("5", r"5\mathrm{e}^{-2}"),
    ("(1,2)", r"(1\mathrm{i},2\mathrm{i})"),
    ("0.5", r"0.5\text{ per cent}"),
    ("0.5", r"0.5\text{ pct}"),
    ("5", r"5\text{ thirty}"),
    ("5", r"5\text{ M}"),
    ("5", r"5\text{k}"),
    ("5", r"5\text{ lakh}"),
    ("5", r"5\text{ thousandfold}"),
    ("5", r"5\text{ negative}"),
    (r"\tan^{-1} 2", r"\frac{1}{\tan 2}"),
    ("5", r"\sqrt(x)=5"),
    ("2", r"\ln(x)=2"),
    ("5", r"\neg=5"),
    ("5", r"\text{wrong}=5"),
    ("5", r"\text{not }x=5"),
    ("385", r"\sum_{k=1}^{10}k^2"),
    ("42", r"\int_0^{42}1dx"),
    ("3", r"\log_2 8"),
    ("6", "3!"),
    ("101_2", "101_3"),
    ("0.5", r"50\%"),
    ("0.5", r"0.5\%"),
    ("(1,50)", r"(1,50\%)"),
    (r"50\%", "0.5"),
    ("5", "2+3"),
    ("5", r"\frac{10}{2}"),
    ("4", r"\sqrt{16}"),
    ("5", "101_2"),
    ("101_2", "5"),
    ("5", r"\text{not }5"),
    ("5", r"\neq 5"),
    ("5", r"5\text{ thousand}"),
    ("5", "9^{9^{9}}"),
    (r"\sqrt2", "9^{9^{9^{9}}}"),
    ("5", "10^{10^9}"),
    ("x^2", "x^{9^{9^9}}"),
    ("5", "٥"),
    ("5", "５"),
    (r"3\sqrt2", r"\sqrt2+\sqrt2+\sqrt2"),
    (r"1+2\sqrt2", r"(1+\sqrt2)(3-\sqrt2)"),
    ("7x", "4x+3x"),
    ("x+1", r"\frac{x^2-1}{x-1}"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("(1,234)", "(1234)"),
    (r"\pi", "3.14159265358979"),
    (r"\frac13", "0.333333"),
    (r"\pi", r"\pi+0.00000000000000000000000000000001"),
    ("5", "5 or 6"),
    ("1,2", "1"),
    ("x=5", "y=5"),
    ("5", "5,5.1"),
    (r"90^\circ", r"\frac{\pi}{2}"),
    (r"5 \text{ cm}", "5 m"),
    (r"5 \text{ cm}", r"5\text{ m}"),
    ("-1", r"e^{i\pi}"),
    ("-1", "i^2"),
    ("1024", "2^{10}"),
    ("12", "1 2"),
    ("3", r"\frac{6}{2}"),
    (r"\ln 2", r"\ln 8-\ln 4"),
    (r"\text{even}", "not even"),
    (r"\text{east}", "seat"),
    ("-5", "5"),
    (r"8:34 \text{ p.m.}", r"8:34 \text{ a.m.}"),
    (r"8\sqrt2", r"\sqrt{50}+\sqrt{18}"),
    (r"8\sqrt2", r"\sqrt{18}-(-\sqrt{50})"),
    (r"2\sqrt[3]{2}", r"\sqrt[3]{54}-\sqrt[3]{2}"),
    (r"\frac{5\sqrt2}{6}", r"\sqrt{\frac12}+\frac{\sqrt2}{3}"),
    ("1+2i", r"\frac{5}{1-2i}"),
    ("1+2i", r"\frac{-5}{2i-1}"),
    ("-i", r"\frac1i"),
    ("a^5", "a^2a^3"),
    ("x^5", "x^7x^{-2}"),
    ("x", "x^2x^{-1}"),
    ("10000", "10^4"),
    ("1e4", "10^5"),
    ("1.5e-3", r"1.5\times10^3"),
    ("5e-3", r"5\times10^{3}"),
    ("5", r"5\text{ hundred}"),
    ("5", r"5\text{ dozen eggs}"),
    ("5", r"5\text{ halves}"),
    ("5", r"5\text{ or less}"),
    ("5", r"5\text{ plus one}"),
    ("5", r"5\text{ squared}"),
    ("5", r"5\text{ is wrong}"),
    ("1450", r"\{1,450\}"),
    ("x=1, y=2", "(2,1)"),
    ("(1,2)", "y=1, x=2"),
    ("(2,3)", r"\{2\}"),
    ("x>2", r"[2,\infty)"),
    ("x>2", r"(-\infty,2)"),
    ("(2,5)", "2<x"),
    (r"\emptyset", "0"),
    (r"\cos 20^\circ", r"\cos 20"),
    ("10", r"9^\circ+1"),
    (r"I(0)e^{-t/\tau}", "0"),
    (r"I(0)e^{-t/\tau}", r"-I(0)e^{-t/\tau}"),
    (r"I(0)e^{-t/\tau}", r"I(1)e^{-t/\tau}"),
    (r"I_0e^{-t}", r"-I_0e^{-t}"),
    ("S(2)+1", "3"),
    (r"E(1)\pi", r"e\pi"),
    (r"N\pi", r"3\pi"),
    ("Q+1", "1"),
    ("O+1", "1"),
)
QUESTIONS = (
    ("What percent of them are red?", "50", r"50\%", Verdict.EQUAL),
    ("By how many \\% does it rise?", "50", r"50\%", Verdict.EQUAL),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(1+x)^2", Verdict.DIFFERENT),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "1+2x+x^2", Verdict.EQUAL),
    (r"Factor \(ab+5b+2a+10\).", "(a+5)(b+2)", "10+2a+5b+ab", Verdict.DIFFERENT),
    ("Let $f(x)=(x+1)^2$. Expand.", "x^2+2x+1", "f(x)=(x+1)^2", Verdict.DIFFERENT),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2+0", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"1\sqrt{242}", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"\frac{2\sqrt{242}}{2}", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"\frac{\sqrt{242}}{1}", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"-(-\sqrt{242})", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"\sqrt{242}^1", Verdict.DIFFERENT),
    (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"\sqrt{2}\cdot 11", Verdict.EQUAL),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "1(ab+5b+2a+10)", Verdict.DIFFERENT),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "-(-(ab+5b+2a+10))", Verdict.DIFFERENT),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "b(a+5)+2a+10", Verdict.DIFFERENT),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "(-a-5)(-b-2)", Verdict.EQUAL),
    (
        "Factor $30x^3-8x^2+20x$ completely.",
        "2x(15x^2-4x+10)",
        "2(15x^3-4x^2+10x)",
        Verdict.DIFFERENT,
    ),
    (
        r"Find $\frac{-3+4i}{1+2i}$ and 3.",
        "(1+2i,3)",
        r"(\frac{-3+4i}{1+2i},3)",
        Verdict.DIFFERENT,
    ),
    ("What is $10^3$?", "1000", "10^{3}", Verdict.DIFFERENT),
    (r"Write $5\times10^3$ in full.", "5000", r"5\times10^3", Verdict.DIFFERENT),
    (r"Which is larger, $\sqrt8$ or 2?", r"2\sqrt2", r"\sqrt8", Verdict.DIFFERENT),
    (r"Which is larger, $\sqrt8$ or 2?", r"\sqrt8", r"1\cdot\sqrt8", Verdict.EQUAL),
    (
        r"Is $\frac{1}{2}$ more than $0.4$? Say the larger.",
        r"\frac{1}{2}",
        "1/2",
        Verdict.EQUAL,
    ),
)


@pytest.mark.parametrize(("truth", "answer"), RIGHT + notations.RIGHT)
def test_honest_forms_are_right(checker, truth, answer):
    assert checker.check(truth, answer) is Verdict.EQUAL


@pytest.mark.parametrize(("truth", "answer"), WRONG + notations.WRONG)
def test_other_values_and_what_is_left_to_compute_are_wrong(checker, truth, answer):
    assert checker.check(truth, answer) is Verdict.DIFFERENT


@pytest.mark.parametrize(("question", "truth", "answer", "verdict"), QUESTIONS)
def test_what_the_question_gives_is_no_answer(checker, question, truth, answer, verdict):
    assert checker.check(truth, answer, question) is verdict


UPPER, LOWER = (
    "+".join(f"1/{n}^{{1400}}" for n in range(start, start + 60)) for start in (101, 161)
)
LONG_FRACTION = rf"\frac{{{UPPER}}}{{{LOWER}}}x" + "/2" * 30
HOSTILE = [
    *("(" * 900, "{" * 900 + "1" + "}" * 900, "1/" * 900 + "1", "2^" * 900 + "2", "-" * 900 + "1"),
    *(r"\frac" * 300, r"\sin" * 300 + "x", r"\sqrt" * 300 + "2", "1!" * 900, "," * 1900, "|" * 900),
    *("9" * 1990, "0." + "9" * 1900, "1" + "0" * 1000, r"\pm" * 600 + "1", "=" * 1900, "1:" * 900),
    *(
        "9^{9^{9^{9}}}",
        "(9^{9})!^{9}",
        r"2^{100}" * 200,
        "1,2" * 600,
        "a" * 1990,
        "\\{" * 600,
        "x_" * 900,
        LONG_FRACTION,
    ),
    *(r"5_{\text{" + " " * 1900 + "x y}}", r"_{\text{" + " " * 1980, " " * 1990 + "1"),
    *("(1+" * 35 + r"\sqrt7" + ")" * 35, r"\sqrt{99991}(" * 60 + "1+a" + ")" * 60),
    *("1 " * 990, "{1 " * 600, r"\text{" * 300, r"\text{a\cdot " * 140, r"{a\over " * 200),
    *(
        "(a+b+c)" * 280,
        "(1+(a+" * 300 + "b" + "))" * 300,
        "((a+b)(c+d)+e)" * 140 + "+x",
        "[a+" * 600,
    ),
    *(r"\begin{array}{c}" * 110, "(1)" * 600, "(1" * 900, "1^" + "{" * 900, r"x\approx" * 200),
]


def reading(text):
    """Seconds of this thread."""
    start = time.thread_time()
    form = read(text)
    if form.node is not None:
        form.node.rational, form.node.key, operations(form.node)
    return time.thread_time() - start


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_slow_to_read_or_ends_the_reader(text):
    """Of three readings one is without a garbage collection, which takes a second after other tests."""
    assert min(reading(text) for _ in range(3)) < 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("1\\frac{4}{5}", "9/5"), ("2 1/2", "5/2"), ("0.1\\overline{6}", "1/6"), (".5", "1/2"),
     ("-\\frac12", "-1/2"), ("2^{10}", "1024"), ("2^{-1}", "1/2"), ("3\\times 10^2", "300")],
)  # fmt: skip
def test_numbers_are_exact(text, number):
    assert str(parse(text).rational) == number


@pytest.mark.parametrize(
    "text",
    ["1 2", "x2", "2^10", r"\frac123", r"\sqrt13", "2^3^4", "1\\frac{5}{2}x", "", "5 +", ")"],
)
def test_what_could_be_read_in_two_ways_is_not_read(text):
    with pytest.raises(UnreadableError):
        parse(text)


def test_power_too_long_to_write_has_no_value():
    assert parse("10^{10^{9}}").rational is None
    assert parse("0^{-1}").rational is None
    assert parse(r"\frac{1}{0}").rational is None
