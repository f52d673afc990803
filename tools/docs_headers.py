"""The C++ reference: what the public headers say of each public name, as Markdown.

Doxygen tells which names there are, and where. Declarations and comments are taken from the headers as they stand there, as
these are written to be read.
"""

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

HEADERS = Path("include/fsdp")
UMBRELLA = "fsdp.hpp"
MADE = ".in"  # behind the name of a header that the build makes: what it is made from
MACROS = "FSDP_"
OPTIONS = """
INPUT = {headers}
RECURSIVE = YES
FILE_PATTERNS = *.hpp *.hpp{made}
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = FSDP_API=
EXTENSION_MAPPING = {extension}=C++
OUTPUT_DIRECTORY = {output}
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
EXTRACT_ALL = YES
XML_PROGRAMLISTING = NO
EXCLUDE_SYMBOLS = fsdp::detail*
QUIET = YES
WARNINGS = NO
"""
TYPES = ("class", "struct")


@dataclass
class Name:
    """A public name of a header: its declaration, and what is written about it."""

    name: str  # "FSDPModule::unshard", without the namespace
    kind: str  # Doxygen's: define, function, variable, typedef, enum, enumvalue, class, struct
    header: str  # "fsdp_module.hpp", "testing/recording.hpp"
    line: int
    members: list["Name"] = field(default_factory=list)


def run_doxygen(root, output):
    """Reads all public headers; returns the folder of XML."""
    output.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(["doxygen", "-"], text=True, capture_output=True, timeout=120,
                         input=OPTIONS.format(headers=root / HEADERS, output=output, made=MADE, extension=MADE[1:]))
    if ran.returncode != 0:
        raise RuntimeError(f"doxygen failed: {ran.stderr}")
    return output / "xml"


def read_names(xml):
    """The public names by header, each header's in the order in which they stand there."""
    index = ElementTree.parse(xml / "index.xml")
    found = []
    for compound in index.iter("compound"):
        kind, name = compound.get("kind"), compound.findtext("name")
        if kind in TYPES and name.startswith("fsdp::") or (kind == "namespace" and name == "fsdp"):
            definition = ElementTree.parse(xml / f"{compound.get('refid')}.xml").find("compounddef")
            found += _of_namespace(definition) if kind == "namespace" else _of_type(definition, name)
        elif kind == "file":
            found += _macros(ElementTree.parse(xml / f"{compound.get('refid')}.xml").find("compounddef"))
    by_header = {}
    for name in sorted(_nested(found), key=lambda each: each.line):
        by_header.setdefault(name.header, []).append(name)
    return by_header


def _nested(names):
    """Types within types as members of these."""
    types = {name.name: name for name in names if name.kind in TYPES}
    outer = []
    for name in names:
        around = types.get(name.name.rpartition("::")[0]) if name.kind in TYPES else None
        (around.members if around else outer).append(name)
    for name in types.values():
        name.members.sort(key=lambda each: each.line)
    return outer


def _place(element):
    location = element.find("location")
    path = Path(location.get("declfile") or location.get("file"))
    name = path.name.removesuffix(MADE)
    # A folder of test aids is the only one below.
    return (name if path.parent.name == HEADERS.name else f"{path.parent.name}/{name}"), int(location.get("declline") or location.get("line"))


def _macros(definition):
    return [made for member in definition.iter("memberdef") if member.get("kind") == "define"
            for made in _of_member(member, "") if made.name.startswith(MACROS)]


def _of_namespace(definition):
    return [made for member in definition.iter("memberdef") for made in _of_member(member, "")]


def _of_type(definition, name):
    header, line = _place(definition)
    short = name.removeprefix("fsdp::")
    made = Name(short, definition.get("kind"), header, line)
    if definition.get("prot") != "public" or "<" in short:
        return []
    for member in definition.iter("memberdef"):
        made.members += _of_member(member, short + "::")
    made.members = [each for each in made.members if not _is_plumbing(each, short)]
    return [made]


def _is_plumbing(member, its_type):
    """Copying, destroying and comparing, which nobody looks up."""
    last = member.name.rpartition("::")[2]
    return last.startswith("~") or last.startswith("operator=")


def _of_member(member, prefix):
    if member.get("prot") not in ("public", "protected") or member.get("kind") == "friend":
        return []
    header, line = _place(member)
    made = Name(prefix + member.findtext("name"), member.get("kind"), header, line)
    made.members = [Name(f"{made.name}::{value.findtext('name')}", "enumvalue", header, line)
                    for value in member.iter("enumvalue")]
    return [made]


class Header:
    """A header's text, by lines that Doxygen counts from 1."""

    def __init__(self, path):
        self.lines = path.read_text().splitlines()

    def comment(self, line):
        """What stands in `///` before a declaration, or behind it."""
        first = self._first_of(line)
        above = []
        while first > 1 and self.lines[first - 2].lstrip().startswith("///"):
            first -= 1
            above.insert(0, self.lines[first - 1].lstrip()[3:].removeprefix(" "))
        behind = self.lines[line - 1].partition("///<")[2].strip()
        following = line
        while behind and following < len(self.lines) and self.lines[following].lstrip().startswith("///<"):
            behind += " " + self.lines[following].lstrip()[4:].strip()
            following += 1
        return above or ([behind] if behind else [])

    def has_comment_above(self, line):
        return self.lines[max(self._first_of(line) - 2, 0)].lstrip().startswith("///")

    def declaration(self, line):
        """A declaration without its body, from the left margin."""
        if self.lines[line - 1].startswith("#"):
            return re.match(r"# *define \w+", self.lines[line - 1])[0]
        first = self._first_of(line)
        taken, depth = [], 0
        for text in self.lines[first - 1:first + 40]:
            code = re.sub(r"\s*//.*", "", text)
            taken.append(code)
            depth += code.count("(") - code.count(")")
            if depth <= 0 and re.search(r"[;{]|\)\s*:", code):
                break
        indent = len(taken[0]) - len(taken[0].lstrip())
        text = "\n".join(each[indent:] if not each[:indent].strip() else each for each in taken).strip()
        text = re.sub(r"\s*\{$", "", text)
        if "{}" not in text and not re.search(r"=\s*[^;]*\{[^;]*\};$", text):
            text = re.sub(r"\s*\{[^}]*(\}.*)?$", "", text)
        # A constructor's initialisers, and the body of one that has none.
        text = re.sub(r"\)\s*:\s*\w+_?\(.*$", ")", text, flags=re.DOTALL)
        return re.sub(r"\)( const)?\s*\{.*\}$", r")\1", text).removesuffix(";").strip()

    def touches(self, line, next_line):
        """True if no empty line lies between two declarations."""
        return all(text.strip() for text in self.lines[line - 1:next_line - 1])

    def _first_of(self, line):
        """The declaration's first line: Doxygen says where the name stands, which may be lines below."""
        while line > 1 and re.match(r"\s*[^\s/#].*[^\s;{}:]$", re.sub(r"\s*//.*", "", self.lines[line - 2])):
            line -= 1
        return line

    def enumerators(self, line):
        """(name, comment) of each value of an enum."""
        text = "\n".join(self.lines[line - 1:])
        body = text[text.index("{") + 1:text.index("};")]
        found, above = [], []
        for row in body.splitlines():
            code, _, behind = row.partition("///<")
            if row.lstrip().startswith("///"):
                above.append(row.strip().removeprefix("///").strip())
                continue
            names = re.findall(r"\bk\w+", code)
            for name in names:
                found.append((name, behind.strip() or " ".join(above)))
            above = [] if names else above
        return found


def anchor(name):
    return "cpp-" + re.sub(r"\W+", "-", name).strip("-")


def _escaped(text):
    """What would be Markdown or HTML in a sentence, but for code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([_*])", r"\\\1", part.replace("<", "&lt;")) for part in parts)


def as_markdown(comment):
    """Comments name parameters as `inputs: what they are`, which becomes a list; what is indented by four is code, or a table
    in columns, as it stands."""
    lines, in_list, block = [], False, []

    def end_block():
        if block:
            shortest = min(len(text) - len(text.lstrip()) for text in block)
            lines.extend(["", "```cpp" if "(" in "".join(block) and "->" not in block[0] else "```text",
                          *(text[shortest:] for text in block), "```", ""])
            block.clear()

    for text in comment:
        named = re.match(r"([a-z_]+(?:, [a-z_]+)*|[a-z_]+\([a-z_, ]*\)): (\S.*)", text)
        starts = not lines or not lines[-1].strip()
        if block and text.startswith("  ") or starts and not in_list and re.match(r"    \S|  \S.*\S   +\S", text):
            block.append(text)
            continue
        end_block()
        if not text.strip():
            in_list = False
            lines.append("")
        elif named and len(comment) > 1 and (in_list or starts):
            if not in_list:
                lines.append("")
            lines.append(f"- `{named[1]}`: {_escaped(named[2])}")
            in_list = True
        else:
            lines.append(("  " if in_list else "") + _escaped(text.strip()))
    end_block()
    return "\n".join(lines).strip("\n")


def _declared_together(names, header):
    """Names that one comment is about: overloads, and what follows a comment without a line between and has none itself."""
    together = []
    for name in names:
        before = together[-1][-1] if together else None
        if before and (before.name == name.name or _goes_with(before, name, header)):
            together[-1].append(name)
        else:
            together.append([name])
    return together


def _goes_with(before, name, header):
    return (before.kind == name.kind and name.kind in ("define", "function", "variable") and not header.comment(name.line)
            and header.has_comment_above(before.line) and header.touches(before.line, name.line))


def _by_comment(names, header):
    parts = []
    for name in names:
        if parts and not header.comment(name.line):
            parts[-1].append(name)
        else:
            parts.append([name])
    return parts


def _render(names, header, level, seen):
    """A heading, the declarations and what is written about them. A name that comes again has no anchor of its own."""
    lines, first = [], names[0]
    others = dict.fromkeys(anchor(name.name) for name in names[1:])
    identity = anchor(first.name)
    mark = f" {{ #{identity} }}" if identity not in seen else ""
    lines += [f"{'#' * level} `{first.name}`{mark}", ""]
    lines += ["".join(f'<a id="{other}"></a>' for other in others if other not in seen and other != identity), ""]
    seen.update([identity, *others])
    for about in _by_comment(names, header):
        if first.kind not in (*TYPES, "enum"):
            end = "" if first.kind == "define" else ";"
            lines += ["```cpp", *(header.declaration(name.line) + end for name in about), "```", ""]
        lines += [as_markdown(header.comment(about[0].line)), ""]
    if first.kind == "enum":
        for value, comment in header.enumerators(first.line):
            lines.append(f"- `{value}`" + (f": {_escaped(comment)}" if comment else ""))
        lines.append("")
    members = [member for member in first.members if member.kind != "enumvalue"]
    for together in _declared_together(members, header):
        lines += _render(together, header, min(level + 1, 6), seen)
    return lines


def render(root, names, header, seen):
    """A section for a header's names. seen: the anchors that the page has already."""
    path = root / HEADERS / header
    text = Header(path if path.exists() else path.with_name(header + MADE))
    lines = [f"In `<fsdp/{header}>`:", ""]
    for together in _declared_together(names, text):
        lines += _render(together, text, 3, seen)
    return "\n".join(lines)


def all_names(names):
    """Of one header, with those inside its types and enums."""
    for name in names:
        yield name
        yield from all_names(name.members)
