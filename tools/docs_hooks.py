"""What mkdocs runs while it builds the site: tools/docs names this file.

- A line `::: fsdp/NAME.hpp` becomes the reference of that header.
- `fsdp::name` in C++ and `fsdp.name` in Python, written as code in a sentence, become links to the reference. A name that
  is not in it is a warning, which fails the build.
- Pictures of bench/results/ are copied to the site.
- Links out of docs/ to other files of the repository are replaced by the file's name, as the site has no copies of them.
"""

import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import docs_headers
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.hooks.fsdp")

HEADER = re.compile(r"^::: fsdp/([\w/]+\.hpp)$", re.MULTILINE)
PYTHON = re.compile(r"^::: fsdp\.([\w.]+)$|\{ #fsdp\.([\w.]+) \}|<a id=\"fsdp\.(\w+)\">", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<![\[`])`fsdp(::|\.)([A-Za-z_][\w:.]*)(\(.*?\)|<.*?>)?`(?!`)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()((?:\.\./)+)(bench/results/)([\w.-]+\))")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)((?:include|examples|tools|test|bench|lib|bindings)/[^)]*|README\.md)\)")
# Modules of the package, and files, are written like its names.
NOT_NAMES = {"hpp", "so", "log", "pc", "egg"}

_headers = {}  # header -> its names
_cpp = {}      # name -> (page, anchor)
_python = {}   # name -> page


def on_pre_build(config):
    _headers.clear()
    _headers.update(docs_headers.read_names(docs_headers.run_doxygen(ROOT, ROOT / ".cache" / "docs" / "doxygen")))


def on_files(files, config):
    """Where each name will be, before any page is made."""
    _cpp.clear()
    _python.clear()
    for file in list(files.documentation_pages()):
        text = Path(file.abs_src_path).read_text()
        for _, _, folder, name in PICTURE.findall(text):
            name = name.rstrip(")")
            if f"assets/{name}" not in files.src_uris and (ROOT / folder / name).exists():
                files.append(File.generated(config, f"assets/{name}", abs_src_path=str(ROOT / folder / name)))
        for header in HEADER.findall(text):
            if header not in _headers:
                log.warning("%s: there are no public names in %s", file.src_uri, header)
            for name in docs_headers.all_names(_headers.get(header, [])):
                # A value of an enum is found at the enum.
                shown = name.name.rpartition("::")[0] if name.kind == "enumvalue" else name.name
                _cpp.setdefault(name.name, (file.src_uri, docs_headers.anchor(shown)))
        for found in PYTHON.findall(text):
            _python["".join(found)] = file.src_uri


def on_page_markdown(markdown, page, config, files):
    depth = page.file.src_uri.count("/")
    parts = FENCE.split(markdown)
    for index in range(0, len(parts), 2):
        parts[index] = PICTURE.sub(lambda found: f"{found[1]}{'../' * depth}assets/{found[4]}", parts[index])
        parts[index] = OUTSIDE.sub(lambda found: _outside(found, page), parts[index])
        if not page.file.src_uri.startswith("reference/"):
            parts[index] = CODE.sub(lambda found: _linked(found, page, "../" * depth), parts[index])
    seen = set()

    def reference(found):
        return docs_headers.render(ROOT, _headers.get(found[1], []), found[1], seen)

    return HEADER.sub(reference, "".join(parts))


def _outside(found, page):
    path = ROOT / "docs" / Path(page.file.src_uri).parent / (found[2] + found[3])
    if not path.resolve().exists():
        log.warning("%s: there is no file %s", page.file.src_uri, found[2] + found[3])
    return f"`{found[3]}`" if found[1].strip("`") == found[3] else f"{found[1]} (`{found[3]}`)"


def _linked(found, page, up):
    separator, name, rest = found[1], found[2].rstrip(":."), found[3] or ""
    text = f"`fsdp{separator}{found[2]}{rest}`"
    if separator == "::":
        if name in _cpp:
            source, anchor = _cpp[name]
            return f"[{text}]({up}{source}#{anchor})"
    elif name in _python:
        return f"[{text}]({up}{_python[name]}#fsdp.{name})"
    elif name.partition(".")[0] in _python:  # a method, which is shown with its class
        owner = name.partition(".")[0]
        return f"[{text}]({up}{_python[owner]}#fsdp.{name})"
    elif name in NOT_NAMES or name.startswith("_"):
        return found[0]
    log.warning("%s: %s is in no page of the reference", page.file.src_uri, text)
    return found[0]
