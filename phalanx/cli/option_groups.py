"""Help texts whose options stand in groups."""

from __future__ import annotations

from typing import Any

import click

OTHER = "Other options"


class GroupedOption(click.Option):
    """An option that the help shows under a heading.

    Args:
        group: the heading.
    """

    def __init__(self, *args: Any, group: str = OTHER, **settings: Any):
        super().__init__(*args, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows its options under their headings, in the order in which these first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and record[1]:  # arguments have no help of their own
                groups.setdefault(getattr(parameter, "group", OTHER), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
