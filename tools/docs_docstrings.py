"""What griffe, which reads the Python package for mkdocstrings, is told of its docstrings: these say of each argument
`name: what it is` in running text, which becomes a list here."""

import re

import griffe


def as_list(text, names):
    """`text` with the arguments among `names` as items. A sentence that begins with `name: ` or `one, other: ` is about
    them."""
    if not names:
        return text
    name = "|".join(re.escape(each) for each in sorted(names, key=len, reverse=True))
    about = re.compile(rf"(?:^|(?<=\. )|(?<=\.\n))((?:{name})(?:,? (?:and )?(?:{name}))*(?:, (?:{name}))*): ")
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    ") or not about.search(paragraph):
            paragraphs.append(paragraph)
            continue
        before, *rest = about.split(paragraph)
        if before.strip():
            paragraphs.append(before.strip())
        paragraphs.append("\n".join(f"- `{subject}`: {' '.join(words.split())}"
                                    for subject, words in zip(rest[::2], rest[1::2])))
    return "\n\n".join(paragraphs)


class Arguments(griffe.Extension):
    def on_function(self, *, func, **_):
        if func.docstring:
            func.docstring.value = as_list(func.docstring.value, [each.name for each in func.parameters if each.name != "self"])

    def on_class(self, *, cls, **_):
        if not cls.docstring:
            return
        made = cls.members.get("__init__")
        names = [each.name for each in made.parameters if each.name != "self"] if made is not None and made.is_function else []
        names += [name for name, member in cls.members.items() if member.is_attribute and not name.startswith("_")]
        cls.docstring.value = as_list(cls.docstring.value, names)
