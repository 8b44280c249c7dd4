"""A certificate of an endpoint as one readable page: Markdown for tickets, HTML for browsers. Everything that came from a
server is escaped."""

import html
import re
from collections.abc import Sequence

from foretell.certify.endpoint.report import EndpointCertificate, EndpointCheck

SHOWN = 5
STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
.verdict{font-size:1.3rem;font-weight:600;padding:.6rem 1rem;border-radius:.4rem;border-left:.5rem solid}
.good{border-color:#2e7d32;background:#2e7d3222}.bad{border-color:#c62828;background:#c6282822}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #8884}
td.DEFECT{color:#c62828;font-weight:600}td.skipped{opacity:.65}
@media(prefers-color-scheme:dark){td.DEFECT{color:#ff8a80}}
code{font-size:.9em;overflow-wrap:anywhere}li{margin:.3rem 0}
@media(max-width:44rem){ /* a check is a block, its verdict beside its name */
.checks tr:first-child{display:none}
.checks tr{display:grid;grid-template-columns:1fr auto;gap:0 1rem;padding:.5rem 0;border-bottom:1px solid #8884}
.checks td{border:0;padding:.1rem 0;grid-column:1/-1}
.checks td:first-child{grid-column:1;font-weight:600}.checks td:last-child{grid-area:1/2;font-weight:600}}
"""


def asked(certificate: EndpointCertificate) -> list[tuple[str, str]]:
    """What was compared with what, and how."""
    s = certificate.settings
    reference = s["reference"]
    rows = [("Endpoint", _named(s)), ("Endpoint takes", s["takes"])]
    if reference is None:
        rows.append(("Reference", "none: compared with itself alone"))
    else:
        rows += [("Reference", _named(reference)), ("Reference takes", reference["takes"])]
    temperatures = ", ".join(f"{value:g}" for value in s["temperatures"]) or "none above 0"
    rows += [
        ("Prompts", f"{s['num_prompts']}, up to {s['max_tokens']} tokens each, temperature 0 and {temperatures}"),
        ("Rounding", f"logit gaps up to {s['tolerance']:g} count as rounding"),
        ("False alarms", f"of the statistical checks together at most {s['alpha']:g} a run"),
        ("Seed", str(s["seed"])),
        ("Time", f"{certificate.seconds:.0f} s"),
    ]
    return rows


def _named(given: dict[str, object]) -> str:
    fields = given["fields"]
    return f"{given['model']} at {given['url']}" + (f" with {fields}" if fields else "")


def markdown_page(certificate: EndpointCertificate) -> str:
    """One Markdown document."""
    out = ["# Is the endpoint's output right?", "", f"**{_md(certificate.verdict)}**", ""]
    out += ["| | |", "|---|---|", *(f"| {name} | {_md(value)} |" for name, value in asked(certificate)), ""]
    for fault in certificate.faults:
        out += [f"## {fault.name}", "", fault.what, "", f"Shown by: {', '.join(fault.evidence)}.", ""]
    out += ["## Checks", "", "| check | question | looked at | found | verdict |", "|---|---|---|---|---|"]
    for check in certificate.checks:
        cells = check.name, check.question, check.looked_at, check.summary, check.verdict
        out.append("| " + " | ".join(map(_md, cells)) + " |")
    for check in with_findings(certificate):
        out += ["", f"### {_md(check.name)}", ""]
        out += [f"- {found.verdict}: {_md(found.where)}: {_md(found.what)}" for found in check.findings[:SHOWN]]
        if len(check.findings) > SHOWN:
            out.append(f"- ... and {len(check.findings) - SHOWN} more (the JSON report has them)")
    return "\n".join(out) + "\n"


def html_page(certificate: EndpointCertificate) -> str:
    """One HTML document without scripts and without anything from elsewhere."""
    e = html.escape
    kind = "good" if certificate.passed else "bad"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Endpoint: {e(certificate.verdict)}</title><style>{STYLE}</style>",
        "<h1>Is the endpoint's output right?</h1>",
        f"<p class='verdict {kind}'>{e(certificate.verdict)}</p><div class=wide><table>",
        *(f"<tr><th>{e(name)}</th><td>{e(value)}</td></tr>" for name, value in asked(certificate)),
        "</table></div>",
    ]
    for fault in certificate.faults:
        shown = e(", ".join(fault.evidence))
        parts.append(f"<h2>{e(fault.name)}</h2><p>{e(fault.what)}</p><p>Shown by: {shown}.</p>")
    parts.append(
        "<h2>Checks</h2><div class=wide><table class=checks><tr>"
        + _row("th", ("check", "question", "looked at", "found"))
    )
    parts.append("<th>verdict</th></tr>")
    for check in certificate.checks:
        style = check.verdict if check.verdict == "DEFECT" else "" if check.passed else "skipped"
        cells = _row("td", (check.name, check.question, check.looked_at, check.summary))
        parts.append(f"<tr>{cells}<td class='{style}'>{e(check.verdict)}</td></tr>")
    parts.append("</table></div>")
    for check in with_findings(certificate):
        items = [
            f"<li><b>{e(found.verdict)}</b> {e(found.where)}: <code>{e(found.what)}</code></li>"
            for found in check.findings[:SHOWN]
        ]
        if len(check.findings) > SHOWN:
            items.append(f"<li>... and {len(check.findings) - SHOWN} more (the JSON report has them)</li>")
        parts.append(f"<h3>{e(check.name)}</h3><ul>{''.join(items)}</ul>")
    return "\n".join(parts) + "</html>\n"


def with_findings(certificate: EndpointCertificate) -> list[EndpointCheck]:
    """The checks that have something to show."""
    return [check for check in certificate.checks if check.findings]


def _row(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def _md(text: str) -> str:
    """Escaped, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))
