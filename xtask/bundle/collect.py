"""Collects the results of run.sh's stages into one results.json and one report.html: collect.py WORK OUT."""

import html
import json
import os
import platform
import re
import sys

import torch

LOG_LIMIT = 40_000
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Overdrive</title>
<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto}</style>
</head><body><h1>Overdrive</h1><p>The bench has written no page.</p></body></html>"""


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def read_json(path):
    try:
        return json.loads(read(path) or "null")
    except ValueError:  # The file was cut off by the time limit.
        return None


def verdict(code, log):
    if code == 0 and re.search(r"^test result: ok\. 0 passed; 0 failed; [1-9]\d* ignored;", log, re.MULTILINE):
        return "skipped"
    return {0: "passed", -1: "not run", 124: "timed out", 137: "timed out", 143: "interrupted"}.get(code, "failed")


def stages(work):
    for line in (read(os.path.join(work, "stages.tsv")) or "").splitlines():
        name, code, seconds = line.split("\t")
        log = (read(os.path.join(work, name + ".log")) or "")[-LOG_LIMIT:]
        last = next((text for text in reversed(log.splitlines()) if text.strip()), "")
        yield {"name": name, "verdict": verdict(int(code), log), "exit_code": int(code), "seconds": int(seconds),
               "last_line": last, "log": log}


def machine():
    try:
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # The device was lost in a stage: the results so far still count.
        devices = [f"not known: {error}"]
    return {"system": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count(), "gpus": devices}


def section(rows):
    """The stages as a section of the bench's page."""
    def row(it):
        name, result, last, log = (html.escape(it[key]) for key in ("name", "verdict", "last_line", "log"))
        return (f"<tr><td>{name}</td><td>{result}</td><td>{it['seconds']} s</td><td>{last}</td></tr>"
                "<tr><td colspan=4><details><summary>log</summary>"
                f"<pre style='overflow:auto'>{log}</pre></details></td></tr>")

    return ("<section style='max-width:60rem;margin:2rem auto;padding:0 1rem'><h2>Stages of this run</h2><table>"
            "<tr><th>stage</th><th>result</th><th>time</th><th>last line</th></tr>"
            + "".join(map(row, rows)) + "</table></section>")


def write(path, text):
    """Writes a file atomically."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".part", path)


def main(work, out):
    rows = list(stages(work))
    results = {"schema": 1, "machine": machine(),
               "versions": {"torch": torch.__version__, "cuda": torch.version.cuda,
                            "python": platform.python_version()},
               "stages": rows}
    for name in ("bench", "versus", "compile-times"):
        results[name] = read_json(os.path.join(work, name + ".json"))
    write(os.path.join(out, "results.json"), json.dumps(results, indent=1))
    page = read(os.path.join(work, "bench.html")) or PAGE
    head, end, tail = page.rpartition("</body>")
    write(os.path.join(out, "report.html"), head + section(rows) + end + tail)

    for it in rows:
        print(f"{it['name']:<13} {it['verdict']:<10} {it['seconds']:>5} s  {it['last_line']}")
    print(f"{os.path.join(out, 'results.json')}\n{os.path.join(out, 'report.html')}")
    return 0 if all(it["verdict"] in ("passed", "skipped") for it in rows) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
