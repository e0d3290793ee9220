"""Pictures of a page for the documentation: at 1280 and 390 pixels, light and dark, in Chromium.

    python tools/picture_report.py runs/quickstart/report.html docs/report/quickstart

writes docs/report/quickstart-1280-light.png, and so on: the top of the page, as high as --height
says. Make the run in an empty folder, so that the page names no folder of yours. `make docs` says
when the report has changed since its pictures were taken.
"""

import argparse
import html
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from check_site import ROOT, TAKEN, look_of_report
from PIL import Image

# Width -> height, in pixels.
SIZES = {1280: 1500, 390: 2200}
# Chromium's numbers.
SCHEMES = {"light": 1, "dark": 0}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
)
# A frame, as Chromium's window is never narrower than 500 pixels.
FRAME = """<!DOCTYPE html><html style="color-scheme: {scheme}"><body style="margin: 0">
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
</body></html>"""


def picture(browser: str, page: Path, width: int, height: int, scheme: str, path: Path) -> None:
    """Write a picture of the top of a page."""
    with tempfile.TemporaryDirectory() as folder:
        frame, shot = Path(folder) / "frame.html", Path(folder) / "shot.png"
        source = html.escape(page.resolve().as_uri())
        frame.write_text(FRAME.format(scheme=scheme, page=source, width=width, height=height))
        look = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
        size = f"--window-size={max(width, 500)},{height}"
        own = (
            f"--user-data-dir={folder}/profile",
            f"--screenshot={shot}",
            size,
            look,
            "--virtual-time-budget=20000",
        )
        done = subprocess.run(
            [browser, *FLAGS, *own, frame.as_uri()], capture_output=True, text=True, timeout=120
        )
        if not shot.exists():
            sys.exit(f"no picture: {done.stderr[-2000:]}")
        with Image.open(shot) as image:
            top = image.convert("RGB").crop((0, 0, width, height))
            # A third of the bytes.
            few = top.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("beginning", type=Path, help="of the pictures' names")
    parser.add_argument("--height", type=int, help=f"in pixels; by width: {SIZES}")
    parser.add_argument(
        "--widths", type=int, nargs="+", choices=SIZES, default=[*SIZES], help="in pixels"
    )
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("neither chromium nor google-chrome is installed")
    options.beginning.parent.mkdir(parents=True, exist_ok=True)
    for width in options.widths:
        for scheme in SCHEMES:
            path = options.beginning.with_name(f"{options.beginning.name}-{width}-{scheme}.png")
            height = options.height or SIZES[width]
            picture(browser, options.page, width, height, scheme, path)
            print(f"{path}: {path.stat().st_size:,} bytes")
    record = options.beginning.with_name(TAKEN)
    taken = json.loads(record.read_text()) if record.exists() else {}
    taken[options.beginning.name] = look_of_report(ROOT)
    record.write_text(json.dumps(taken, indent=1) + "\n")


if __name__ == "__main__":
    main()
