"""Tables of the page, as they are copied into a paper."""

from __future__ import annotations

from vbm_ptm.report.page import PageTable


def test_page_table__latex_takes_names_as_they_are() -> None:
    table = PageTable.of(["run", "last ± sd"], [[r"a_1 $50% {x}^2 ~ \b", "1.0 ± 0.5"]])
    assert (
        r"a\_1 \$50\% \{x\}\textasciicircum{}2 \textasciitilde{} \textbackslash{}b & 1.0 $\pm$ 0.5 \\"
        in table.latex()
    )
