"""Draws the processes of a job and their connections."""

from __future__ import annotations

from scripts.pictures.svg import Drawing

WIDTH, HEIGHT = 860, 470


def draw() -> str:
    drawing = Drawing(WIDTH, HEIGHT, "The processes of a job: a launcher, workers on two hosts, parameter servers")
    _launcher(drawing)
    for index, x in enumerate((0, 445)):
        _host(drawing, x, index)
    _between(drawing)
    _servers(drawing)
    return str(drawing)


def _launcher(drawing: Drawing) -> None:
    drawing.box(170, 0, 520, 76, "card", "line")
    drawing.text(430, 24, "phalanx run", 15, anchor="middle", bold=True)
    drawing.text(
        430, 44, "places tasks, restarts the killed, decides the membership of elastic jobs,", 12, "muted", "middle"
    )
    drawing.text(430, 61, "records events, finds the cause of a failure", 12, "muted", "middle")
    drawing.text(WIDTH, 24, "phalanx status, top,", 12, "muted", "end")
    drawing.text(WIDTH, 41, "dashboard, report", 12, "muted", "end")
    drawing.line([(694, 50), (730, 50)], dash="3 3")


def _host(drawing: Drawing, x: float, index: int) -> None:
    drawing.arrow((x + 207, 78), (x + 207, 122))
    if index:
        drawing.text(x + 215, 105, "ssh", 12, "muted")
    drawing.box(x, 124, 415, 212, "card", "line")
    drawing.text(x + 14, 146, f"host {'ab'[index]}", 13, bold=True)
    for place in range(2):
        rank = 2 * index + place
        left = x + 14 + 200 * place
        drawing.box(left, 158, 187, 126, "card", "blue")
        drawing.text(left + 93, 178, f"worker/{rank}", 13, "blue", "middle", bold=True)
        for line, text in enumerate(("your program, model.fit", "strategy: data, metrics")):
            drawing.text(left + 93, 200 + 17 * line, text, 11.5, "text", "middle")
        drawing.box(left + 10, 226, 167, 22, "sky", radius=3)
        drawing.text(left + 93, 241, "engine: gradients, update", 11.5, "text", "middle")
        drawing.box(left + 10, 253, 167, 22, "sky", radius=3)
        drawing.text(left + 93, 268, "collectives: sum", 11.5, "text", "middle")
    drawing.line([(x + 107, 286), (x + 107, 308), (x + 307, 308), (x + 307, 286)], "green", 2)
    drawing.text(x + 207, 326, "shared memory", 12, "green", "middle")


def _between(drawing: Drawing) -> None:
    drawing.line([(417, 200), (443, 200)], "green", 2)
    drawing.text(430, 354, "between hosts: TCP, encrypted and authenticated", 12, "green", "middle")
    drawing.line([(430, 202), (430, 340)], "green", 1.5, "3 3")


def _servers(drawing: Drawing) -> None:
    drawing.box(0, 384, 415, 80, "card", "amber")
    drawing.text(207, 408, "ps/0, ps/1, ...", 13, "amber", "middle", bold=True)
    drawing.text(207, 428, "with ParameterServerStrategy: hold the variables,", 12, "muted", "middle")
    drawing.text(207, 445, "take gradients; workers pull and push", 12, "muted", "middle")
    drawing.arrow((90, 338), (90, 382), "amber")
    drawing.arrow((110, 382), (110, 338), "amber")
    drawing.box(445, 384, 415, 80, "card", "line")
    drawing.text(652, 408, "evaluator, coordinator", 13, "text", "middle", bold=True)
    drawing.text(652, 428, "evaluates checkpoints in a process of its own;", 12, "muted", "middle")
    drawing.text(652, 445, "schedules functions on workers", 12, "muted", "middle")
