/* html.c - the page of `adze bench --html`: pictures and a table per op, with filters, in one file that loads
   nothing. */
#include "report.h"
#include "suite.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char style[] =
    "<style>\n"
    ":root{--page:#fbfaf7;--card:#fff;--ink:#22252a;--soft:#6a707a;--line:#e3e1da;--c0:#0b6bcb;--c1:#d1520f;"
    "--c2:#2b8a3e;--c3:#8b3fc7;--c4:#b3870a;--c5:#c2255c}\n"
    "@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#1d2024;--ink:#e8e6e1;--soft:#9aa1ab;"
    "--line:#343940;--c0:#5aa9f5;--c1:#ff9457;--c2:#63c877;--c3:#c58cf2;--c4:#e3b53c;--c5:#f27aa2}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:24px 16px 64px;max-width:1180px;background:var(--page);color:var(--ink);"
    "font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,sans-serif}\n"
    "h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.25rem;margin:44px 0 12px;"
    "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}\n"
    "p{margin:4px 0;color:var(--soft);overflow-wrap:anywhere;max-width:80ch}\n"
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:10px;margin:18px 0}"
    ".cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px;"
    "color:var(--soft);font-size:.85rem}.cards b{display:block;font-size:1.3rem;color:var(--ink);"
    "font-variant-numeric:tabular-nums}\n"
    ".pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:8px}"
    "svg{display:block;width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:var(--soft)}"
    "svg .name{font-size:15px;fill:var(--ink)}svg .grid{stroke:var(--line)}"
    "svg .limit{stroke:var(--soft);stroke-dasharray:5 4}svg .dot{font-size:10px}"
    "svg .peer{fill:none;stroke:var(--soft);stroke-width:1.5}.off{display:none}\n"
    "form{display:flex;flex-wrap:wrap;gap:8px 16px;margin:16px 0;font-size:.9rem;color:var(--soft)}"
    "select{margin-left:6px;font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);"
    "border-radius:6px;padding:2px 6px}code{font:.8rem ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    "overflow-wrap:anywhere}td code{display:block;color:var(--soft);user-select:all}"
    "details{margin:12px 0}summary{cursor:pointer}ul{margin:4px 0;padding-left:20px;color:var(--soft)}"
    "tr:target{outline:2px solid var(--c0);outline-offset:-2px}\n"
    ".keys{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0;font-size:.9rem;color:var(--soft)}"
    ".keys i{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:6px}\n"
    ".scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--card);"
    "margin-top:14px}table{border-collapse:collapse;width:100%;font-size:.88rem;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}th,td{padding:6px 12px;text-align:right;border-top:1px solid var(--line)}"
    "th{border-top:0;color:var(--soft);font-weight:600}th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}"
    "td:nth-child(4){background:linear-gradient(90deg,color-mix(in srgb,var(--c0) 22%,transparent) var(--share),"
    "transparent var(--share))}td:first-child{white-space:normal;min-width:30ch}"
    "@media(max-width:600px){th,td{padding:5px 8px}table{font-size:.82rem}}\n"
    "</style>\n";

static void put_text(FILE *f, const char *text)
{
    for (; *text; text++)
        if (*text == '<' || *text == '>' || *text == '&')
            fprintf(f, "&#%d;", *text);
        else
            fputc(*text, f);
}

/* Rows, dots and names of another op, dtype or kernel than was picked are hidden; so is a section without a row. */
static const char script[] =
    "<script>\n"
    "const picks = [...document.querySelectorAll('select')], parts = document.querySelectorAll('[data-op]');\n"
    "function filter() {\n"
    "  for (const part of parts)\n"
    "    part.classList.toggle('off', picks.some(p => p.value && part.dataset[p.name] !== p.value));\n"
    "  for (const section of document.querySelectorAll('section'))\n"
    "    section.classList.toggle('off', !section.querySelector('tr[data-op]:not(.off)'));\n"
    "  const rows = document.querySelectorAll('tr[data-op]:not(.off)').length;\n"
    "  document.getElementById('shown').textContent = rows + (rows === 1 ? ' row' : ' rows');\n"
    "}\n"
    "for (const pick of picks) pick.onchange = filter;\n"
    "filter();\n"
    "</script>\n";

static int same_op(const adze_report *r, int a, int b)
{
    return strcmp(r->rows[a].op, r->rows[b].op) == 0;
}

void adze_html_time(FILE *f, double us)
{
    if (us < 1000)
        fprintf(f, "%.2f us", us);
    else if (us < 1e6)
        fprintf(f, "%.3f ms", us / 1e3);
    else
        fprintf(f, "%.3f s", us / 1e6);
}

static void put_machine(FILE *f, const adze_report *r)
{
    const adze_machine *m = &r->machine;
    fprintf(f, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n");
    fprintf(f, "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
               "<meta name=\"color-scheme\" content=\"light dark\"><title>adze bench: ");
    put_text(f, m->sm ? m->gpu : m->cpu);
    fprintf(f, "</title>\n%s</head><body>\n<h1>adze on ", style);
    put_text(f, m->sm ? m->gpu : m->cpu);
    fprintf(f, "</h1>\n<p>");
    if (m->sm)
        fprintf(f, "sm_%d, %d SMs; driver %s; clocks %s; ", m->sm, m->sm_count, m->driver, m->clocks);
    else
        fprintf(f, "%s, %d threads on %d cores; ", m->isa, m->threads, m->cores);
    fprintf(f, "%scommit %s; %s</p>\n", strcmp(adze_program, "adze") == 0 ? "" : "adze's ", adze_commit(), r->date);
}

static void put_ceilings(FILE *f, const adze_report *r)
{
    static const char *const names[ADZE_PASSES] = {"read", "two reads to one write", "copy", "write"};
    fprintf(f, "<p>The ceilings, which plain loops over memory reached in the same run:</p>\n<div class=\"cards\">");
    for (int i = 0; i < ADZE_PASSES; i++)
        fprintf(f, "<div><b>%.4g</b>GB/s, %s</div>", r->ceilings.rate[i], names[i]);
    fprintf(f, "</div>\n");
}

static void put_guide(FILE *f, const adze_report *r)
{
    fprintf(f,
            "<details open><summary>How to read this page</summary><ul>\n"
            "<li>Each kernel was verified against the definition of its op, then timed with cold caches. A time is "
            "a median; the spread is the distance between the quartiles.</li>\n"
            "<li>Share: the rate of a call, divided by the ceiling for its mix of reads and writes. 100 %% of the "
            "ceiling means that the call took as long as a plain loop that moves the same bytes. A small call "
            "stays far below it, since %s takes longer than its bytes do.</li>\n"
            "<li>Error: the largest error of a result in units in the last place (ulp), and its share of the "
            "limit. The limit is half a unit, for the rounding of the stored result, and what float arithmetic "
            "may add to it. So a right kernel reaches up to 100 %% of the limit; one above it is wrong and is "
            "not timed.</li>\n",
            r->machine.sm ? "a launch" : "waking the threads");
    if (r->machine.sm)
        fprintf(f,
                "<li>Alone: without programmatic dependent launch, so that no call overlaps its neighbour.</li>\n");
    fprintf(f, "<li>Peers: times that bench/compare_torch.py recorded for calls of the same op, dtype and bytes. ");
    if (r->peers[0]) {
        fprintf(f, "They are of ");
        put_text(f, r->peers);
        fprintf(f, ". In the pictures they are rings.</li>\n");
    } else {
        fprintf(f, "This run has none: <code>--peers FILE</code> adds them.</li>\n");
    }
    fprintf(f, "<li>The command under a case repeats its row. A dot is a link to its row; names that would overlap "
               "are left out of the pictures. Lines join calls that differ in rows alone.</li>\n</ul></details>\n");
}

static void put_left_out(FILE *f, const adze_report *r)
{
    fprintf(f,
            "<details id=\"left-out\" open><summary>What was left out</summary><ul>\n<li>Lines that leave the dtype "
            "open were timed with %s; <code>--dtype</code> chooses another.</li>\n",
            r->dtype);
    if (r->one_kernel)
        fprintf(f, "<li>Only the kernel that the library takes was timed; <code>--full</code> times all of them."
                   "</li>\n");
    if (!r->left_out_count)
        fprintf(f, "<li>No call was left out.</li>\n");
    for (int i = 0; i < r->left_out_count; i++) {
        fprintf(f, "<li><code>");
        put_text(f, r->left_out[i].line);
        fprintf(f, "</code>: ");
        put_text(f, r->left_out[i].why);
        fprintf(f, "</li>\n");
    }
    fprintf(f, "</ul></details>\n");
}

static const char *value_of(const adze_bench_row *row, int which)
{
    return which == 0 ? row->op : which == 1 ? row->dtype : row->kernel;
}

/* A list for each of op, dtype and kernel, with the values that occur, in the order in which they do. */
static void put_filters(FILE *f, const adze_report *r)
{
    static const char *const names[] = {"op", "dtype", "kernel"};
    fprintf(f, "<form>");
    for (int which = 0; which < 3; which++) {
        fprintf(f, "<label>%s<select name=\"%s\"><option value=\"\">all</option>", names[which], names[which]);
        for (int i = 0; i < r->count; i++) {
            int j = 0;
            while (strcmp(value_of(&r->rows[j], which), value_of(&r->rows[i], which)) != 0)
                j++;
            if (j == i)
                fprintf(f, "<option>%s</option>", value_of(&r->rows[i], which));
        }
        fprintf(f, "</select></label>");
    }
    fprintf(f, "<output id=\"shown\"></output></form>\n");
}

static void put_peers(FILE *f, const adze_bench_row *row)
{
    fprintf(f, "<td>");
    for (int k = 0; k < row->peer_count; k++) {
        fprintf(f, "%s%s ", k ? ", " : "", row->peers[k].name);
        adze_html_time(f, row->peers[k].us);
        fprintf(f, " (%.2fx)", row->peers[k].us / row->us);
    }
    fprintf(f, "%s</td>", row->peer_count ? "" : "-");
}

static void put_row(FILE *f, const adze_report *r, int i)
{
    const adze_bench_row *row = &r->rows[i];
    fprintf(f, "<tr id=\"row%d\" data-op=\"%s\" data-dtype=\"%s\" data-kernel=\"%s\"><td>%s<code>", i, row->op,
            row->dtype, row->kernel, row->shape);
    fprintf(f, "%s run --device %s '", adze_program, r->device);
    put_text(f, row->line);
    fprintf(f, "'</code></td><td>%s</td><td>", row->kernel);
    adze_html_time(f, row->us);
    fprintf(f, "</td><td style=\"--share:%.0f%%\">%.1f%%</td><td>%.1f</td>", 100 * fmin(row->share, 1),
            100 * row->share, row->gbps);
    if (r->machine.sm) {
        fprintf(f, "<td>");
        adze_html_time(f, row->us_alone);
        fprintf(f, "</td>");
    }
    fprintf(f, "<td>%.1f%%</td><td>%.2f ulp, %.0f%%</td><td>%s</td>", 100 * row->spread, row->ulps, 100 * row->error,
            row->dtype);
    if (r->peers[0])
        put_peers(f, row);
    fprintf(f, "</tr>\n");
}

static void put_table(FILE *f, const adze_report *r, int first)
{
    fprintf(f,
            "<div class=\"scroll\" tabindex=\"0\"><table><tr><th>case</th><th>kernel</th><th>time</th>"
            "<th>share</th><th>GB/s</th>%s<th>spread</th><th>error</th><th>dtype</th>%s</tr>\n",
            r->machine.sm ? "<th>alone</th>" : "", r->peers[0] ? "<th>peers</th>" : "");
    for (int i = first; i < r->count; i++)
        if (same_op(r, i, first))
            put_row(f, r, i);
    fprintf(f, "</table></div>\n");
}

static void put_keys(FILE *f, const adze_report *r, int first)
{
    fprintf(f, "<div class=\"keys\">");
    for (int i = first, next = 0; i < r->count; i++)
        if (same_op(r, i, first) && adze_chart_colour(r, i) == next)
            fprintf(f, "<span><i style=\"background:var(--c%d)\"></i>%s</span>", next++, r->rows[i].kernel);
    fprintf(f, "</div>\n");
}

int adze_html_write(const adze_report *r, const char *path)
{
    FILE *f = fopen(path, "w");
    if (!f)
        return 0;
    put_machine(f, r);
    put_ceilings(f, r);
    put_guide(f, r);
    put_left_out(f, r);
    put_filters(f, r);
    for (int i = 0; i < r->count; i++) {
        if (i > 0 && same_op(r, i, i - 1))
            continue;
        fprintf(f, "<section id=\"%s\"><h2>%s</h2>\n", r->rows[i].op, r->rows[i].op);
        put_keys(f, r, i);
        adze_chart_write(f, r, i);
        put_table(f, r, i);
        fprintf(f, "</section>\n");
    }
    fprintf(f, "%s</body></html>\n", script);
    const int whole = !ferror(f);
    return fclose(f) == 0 && whole;
}
