"""A fact has one owner: who may change what, and where what is decided stands."""

import collections
import re

from structure.rule import Rule, full_name, is_in_type, short

RULES = [
    Rule("inner parts", 0, "uses of a group's inner parts outside of group/ and root/",
         "ask the group or its root; what follows from a change is the owner's business"),
    Rule("changeable parts", 0, "ways to change a group's parts from outside", "make parts() const; root/ changes groups"),
    Rule("changing structs", 0, "functions that change a struct with public data", "make it a class, or the functions free ones"),
    Rule("callbacks", 0, "std::function", "pass who is to be asked as an argument, or name an interface"),
    Rule("untyped owners", 0, "shared_ptr<void>", "name an interface with a virtual destructor"),
    Rule("written settings", 0, "settings written past their owner", "configure (root/configure.hpp)"),
    Rule("decisions", 0, "enums of what schedule/ decides", "move the decision to schedule/"),
]
INNER = re.compile(r"(?:\.|->)(?:unsharder|gradients|changes|notes)\(\)")
HAS_INNER = ("lib/group/", "lib/root/")
CHANGEABLE = re.compile(r"^\s*GroupParts& parts\(\) \{", re.MULTILINE)
# What keeps steps from beginning is told by its life alone (RootContext::hold_steps).
UNTYPED = {"lib/root/root_context.hpp", "lib/root/root_context.cpp", "lib/api/params/full_parameter_scope.hpp"}
WRITTEN = re.compile(r"(?:\bconfig|\boptions\(\))(?:\.\w+)+ (?:[|&+-]?=) ")
DECISIONS = {"Waits", "Start", "Shows", "ShowsEvent"}
# What callers fill, and what only hands a reference on.
OPEN_STRUCTS = {"CallLog", "StateDict"}


def is_change(tag):
    own = tag["scope"].split("::")[-1]
    is_made_or_kept = "const" in tag.get("properties", "").split(",") or re.search(r"\bstatic\b", tag.get("pattern", ""))
    return not (is_made_or_kept or tag["name"].lstrip("~") == own or tag["name"].startswith("operator"))


def look_at_structs(tree, found):
    structs = {full_name(tag) for tag in tree.tags if tag["kind"] == "struct"}
    data, changes = collections.Counter(), collections.defaultdict(set)
    for tag in tree.tags:
        if not is_in_type(tag) or tag["scope"] not in structs or tag.get("access") != "public":
            continue
        if tag["kind"] == "member" and not re.search(r"\bstatic\b", tag.get("pattern", "")):
            data[tag["scope"]] += 1
        elif tag["kind"] in ("prototype", "function") and tag["path"].endswith(".hpp") and is_change(tag):
            changes[tag["scope"]].add(tag["name"])
    for scope, names in changes.items():
        if data[scope] and short(scope) not in OPEN_STRUCTS:
            found.add("changing structs", short(scope), *sorted(names))


def look(tree, found):
    look_at_structs(tree, found)
    for path in tree.sources:
        name, text = tree.name(path), tree.text(path)
        if not name.startswith(HAS_INNER):
            found["inner parts"][name] = len(INNER.findall(text))
        found["changeable parts"][name] = len(CHANGEABLE.findall(text))
        if name.startswith(("lib/group/", "lib/trace/", "lib/schedule/")):
            found["callbacks"][name] = text.count("std::function<")
        if name not in UNTYPED:
            found["untyped owners"][name] = text.count("shared_ptr<void>")
        if name.startswith(("lib/api/", "bindings/")):
            found["written settings"][name] = len(WRITTEN.findall(text))
    for tag in tree.tags:
        if tag["kind"] == "enum" and tag["name"] in DECISIONS and not tag["path"].startswith("lib/schedule/"):
            found.add("decisions", tag["path"], short(full_name(tag)))
