"""The table of these programs."""

from programs.common import registering

PROGRAMS = {}
program = registering(PROGRAMS)
