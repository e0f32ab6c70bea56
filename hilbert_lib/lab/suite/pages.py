"""The index pages' templates: no scripts, no other files than those of the runs, light or dark, fit to print."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #57606a; --line: #d8dee4; --paper: #ffffff;
  --card: #f7f8fa; --link: #0a58ca; --bad: #b3261e; --bad-paper: #fdecea; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1; --line: #3a424b;
  --paper: #14181d; --card: #1c2128; --link: #79b8ff; --bad: #ff8f85; --bad-paper: #3a1d1b; --good: #56d374; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1.1rem; margin: 0; } a { color: var(--link); } p { margin: .35rem 0; }
code { font-size: .9em; overflow-wrap: anywhere; } .soft { color: var(--soft); } .small { font-size: .88rem; }
.card { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: 1rem 1.15rem;
  margin: 0 0 1rem; break-inside: avoid; }
.card.bad { border: 2px solid var(--bad); background: var(--bad-paper); }
.top { display: flex; flex-wrap: wrap; gap: .2rem 1rem; justify-content: space-between; align-items: baseline; }
.status { font-size: .88rem; white-space: nowrap; color: var(--soft); }
.status b { color: var(--good); } .bad .status b, b.bad { color: var(--bad); }
.error { font: .88rem/1.45 ui-monospace, Menlo, Consolas, monospace; color: var(--bad); white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .6rem 0; }
.answer { border-left: 3px solid var(--good); padding-left: .8rem; margin: .6rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .7rem; margin: .8rem 0; }
.figures a { display: block; background: #fff; border: 1px solid var(--line); border-radius: 4px; padding: .4rem; }
.figures img { display: block; width: 100%; height: 11rem; object-fit: contain; }
.links a { margin-right: 1rem; } .links a:first-child { font-weight: 600; }
.proof { margin: 1.2rem 0; } .proof img { display: block; width: 100%; background: #fff; border: 1px solid var(--line);
  border-radius: 4px; padding: .4rem; } .lead .answer { font-size: 1.08rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top;
  padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); } tbody th { font-weight: 500; width: 12rem; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; } .links, nav { display: none; } }
"""

HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style | safe }}</style></head><body>
"""

RUN = (
    HEAD
    + """
<nav class="small"><a href="../index.html">All runs</a></nav>
<h1>{{ title }}</h1>
<p>Each notebook below asks one question, shows the evidence and ends with its answer.
They were run on {{ hardware }}; {{ summary }}.</p>
<p class="soft">{{ kernels }}</p>
{% for point in points %}
{% set ok = point.status == "ok" %}
{% if loop.changed(ok) %}<h2>{{ "Finished" if ok else "Not finished" }}</h2>{% endif %}
<section id="{{ point.folder }}" class="card{{ '' if ok else ' bad' }}">
<p class="soft small">{{ point.notebook }}</p>
<div class="top"><h3>{{ point.title }}</h3>
<span class="status"><b>{{ "✓" if ok else "✗" }} {{ point.status }}</b>
 &middot; {{ point.duration }}</span></div>
<div>{{ point.question | safe }}</div>
{% if point.changes %}<p class="small">with{% for name, value in point.changes.items() %}
 <code>{{ name }} = {{ value }}</code>{{ "," if not loop.last }}{% endfor %}</p>{% endif %}
{% if point.answer %}<div class="answer">{{ point.answer | safe }}</div>{% endif %}
{% if point.error %}<p class="error">{{ point.error }}</p>{% endif %}
{% if point.note %}<p class="small">{{ point.note }}</p>{% endif %}
{% if point.figures %}<div class="figures">{% for file in point.figures[-3:] %}{# a notebook ends with its answer #}
<a href="{{ point.folder }}/{{ file }}"><img src="{{ point.folder }}/{{ file }}" alt="{{ file }}" loading="lazy"></a>
{% endfor %}</div>{% endif %}
<p class="links small">
{% if point.html %}<a href="{{ point.folder }}/{{ point.html }}">Read the notebook</a>{% endif %}
{% if point.ipynb %}<a href="{{ point.folder }}/{{ point.ipynb }}">.ipynb</a>{% endif %}
<a href="{{ point.folder }}/manifest.json">manifest</a></p>
{% if point.data %}<details class="small"><summary>Data and figures ({{ point.data | length }} files)</summary>
{% for file in point.data %}
<a href="{{ point.folder }}/{{ file }}">{{ file }}</a>{{ "," if not loop.last }}
{% endfor %}
</details>{% endif %}
</section>
{% endfor %}
<h2>Where it ran</h2>
<table class="small"><tbody>{% for name, value in environment %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</tbody></table>
</body></html>
"""
)

RUNS = (
    HEAD
    + """
<h1>{{ title }}</h1>
<p>Every run below holds the executed notebooks, their figures and data, and how they ended.</p>
<table><thead><tr><th>Run</th><th>Hardware</th><th>Last change</th><th>Notebooks</th></tr></thead><tbody>
{% for run in runs %}<tr><td><a href="{{ run.folder }}/index.html">{{ run.folder }}</a></td>
<td>{{ run.hardware }}</td><td>{{ run.end }}</td>
<td>{{ run.ok }} finished{% if run.failed %}, <b class="bad">{{ run.failed }} not finished</b>{% endif %}</td></tr>
{% endfor %}</tbody></table>
</body></html>
"""
)

# The committed evidence of several machines, as a page and as Markdown, and its numbers as a part of another file.

EVIDENCE = (
    HEAD
    + """
<h1>{{ title }}</h1>
{% if told %}
<div class="lead">{% for each in told.answer %}
<p class="answer">{{ each.text }} {% for name in each.notebooks -%}
<a class="small" href="#{{ name }}">{{ name }}</a>{{ ", " if not loop.last }}{% endfor %}</p>
{% endfor %}</div>
<figure class="proof"><a href="{{ told.figure }}"><img src="{{ told.figure }}" alt="{{ told.alt }}"></a>
<figcaption class="soft small">{{ told.caption }}</figcaption></figure>
<h2>In numbers</h2>
<table class="small"><thead><tr><th>Work</th><th>Measured</th><th>On</th><th>Record</th></tr></thead><tbody>
{% for row in told.numbers %}<tr><td>{{ row.what }}</td><td>{{ row.measured }}</td><td>{{ row.on }}</td>
<td><a href="{{ row.run }}/results.jsonl">{{ row.record[:2] }}</a></td></tr>
{% endfor %}</tbody></table>
{% else %}<p>The answer waits for records of {{ waiting | join(", ") }}.</p>{% endif %}
<h2>Notebook by notebook</h2>
<div class="soft">{{ how_html | safe }}</div>
{% for notebook in notebooks %}
<section id="{{ notebook.name }}" class="card">
<p class="soft small">{{ notebook.name }}</p>
<h3>{{ notebook.title }}</h3>
<div>{{ notebook.question_html | safe }}</div>
<div class="answer">{{ notebook.answer_html | safe }}</div>
{% for run in notebook.runs %}<p class="small">
<span class="links"><a href="{{ run.html }}">Read the notebook</a> <a href="{{ run.ipynb }}">.ipynb</a>
<a href="{{ run.all }}">data and figures</a></span>
<span class="soft">{{ run.hardware }} &middot; {{ run.end }} &middot; {{ run.code }}
{%- if run.is_revised %} &middot; with the text of its time; the answer above is newer{% endif %}</span></p>
{% endfor %}</section>
{% endfor %}
<h2>Further</h2>
<p>Every run: {% for machine in machines -%}
<a href="{{ machine }}/index.html">{{ machine }}</a>{{ ", " if not loop.last }}{% endfor %}.
{% if history %}How the kernels got there: <a href="{{ history }}">{{ history }}</a>.{% endif %}
{% if others %}Beside the notebooks' runs: {% for each in others -%}
<a href="{{ each }}/">{{ each }}</a>{{ ", " if not loop.last }}{% endfor %}.{% endif %}
Every claim of the documents with its answer: <code>hilbert claims</code>, and notebook 09.</p>
</body></html>
"""
)

EVIDENCE_MARKDOWN = """{% autoescape false -%}
<!-- written by `hilbert report reports` from the records beside it -->

# {{ title }}

{% if told -%}
{% for each in told.answer -%}
{{ loop.index }}. {{ each.text }} (\
{% for name in each.notebooks %}[{{ name }}](#{{ name }}){{ ", " if not loop.last }}{% endfor %})
{% endfor %}
[![{{ told.alt }}]({{ told.figure }})]({{ told.figure }})

{{ told.caption }}

## In numbers

{{ table }}
{%- else -%}
The answer waits for records of {{ waiting | join(", ") }}.
{%- endif %}

## Notebook by notebook

{{ how }}
{% for notebook in notebooks %}
### <a id="{{ notebook.name }}"></a>{{ notebook.name }}: {{ notebook.title }}

{{ notebook.question }}

**Answer.** {{ notebook.answer }}
{% for run in notebook.runs %}
- {{ run.hardware }}, {{ run.end }}, {{ run.code }}: [notebook]({{ run.ipynb }}), [HTML]({{ run.html }}), \
[data and figures]({{ run.folder }})\
{%- if run.is_revised %}; with the text of its time, the answer above is newer{% endif %}
{%- endfor %}
{% endfor %}
## Further

[index.html](index.html) is this page for a reader without a network.
{%- if history %} How the kernels got there: [{{ history }}]({{ history }}).{% endif %}
{%- if others %} Beside the notebooks' runs: {% for each in others %}[{{ each }}]({{ each }})\
{{ ", " if not loop.last }}{% endfor %}.{% endif %} Every claim of the documents with its answer: \
`.venv/bin/hilbert claims`, and notebook 09.
{% endautoescape %}"""

NUMBERS_MARKDOWN = """{% autoescape false -%}
| work | measured | on | record |
| --- | --- | --- | --- |
{%- for row in told.numbers %}
| {{ row.what }} | {{ row.measured }} | {{ row.on }} | [{{ row.record[:2] }}]({{ base }}{{ row.run }}) |
{%- endfor %}
{%- endautoescape %}"""

README_MARKDOWN = """{% autoescape false -%}
{% for each in told.answer -%}
{{ loop.index }}. {{ each.text }}
{% endfor %}
[![{{ told.alt }}]({{ base }}{{ told.figure }})]({{ base }}README.md)

{{ told.caption }}

{{ table }}

[![{{ told.speeds_alt }}]({{ base }}{{ told.speeds }})]({{ base }}README.md)
{%- endautoescape %}"""
