"""A report as one HTML file that needs nothing beside it: figures in tables, plots as inline SVG. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.15rem .8rem .15rem 0;text-align:left;"
    "border-bottom:1px solid #ddd;vertical-align:top}.plots{display:flex;flex-wrap:wrap}svg{max-width:100%;height:auto}"
)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    return "<table>" + "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def page(title: str, figures: Sequence[tuple[str, str]], plots: Iterable[str], facts: Mapping[str, object]) -> str:
    """The whole page. `plots` are SVG elements, `facts` what is known of machine and versions."""
    known = [(name, str(value)) for name, value in facts.items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{table(figures)}"
        f'<div class="plots">{"".join(f"<figure>{plot}</figure>" for plot in plots)}</div>'
        f"<h2>Measured on</h2>{table(known)}</body></html>\n"
    )
