"""The picture of the live view: `python docs/live_view.py RUN OUT.svg` draws a run directory's screen as SVG."""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from isobit.monitor.screen.screen import screen
from isobit.monitor.screen.watch import Watched

WIDTH, HEIGHT = 104, 24

run, out = Path(sys.argv[1]), Path(sys.argv[2])
watched = Watched(run)
watched.look()
console = Console(record=True, width=WIDTH, height=HEIGHT, force_terminal=True, file=StringIO())
console.print(screen(watched.history, WIDTH, HEIGHT))
svg = console.export_svg(title=f"isobit watch {run.name}", unique_id="live")
svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # the reader's own font: nothing is fetched
out.write_text(svg.replace("Fira Code, monospace", "ui-monospace, monospace"), encoding="utf-8")
