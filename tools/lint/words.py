"""One word, one meaning: words that were replaced stay away, those of the glossary are counted.

words.py                 where a replaced word is back, and what to use (exit status 1); then how
                         often each word of docs/glossary.md is used, and in how many files
words.py --list WORD...  every place of these words, or of all of the glossary, to be read: each
                         has the meaning that the glossary gives
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh", ".inc", ".in", ".py", ".pyi", ".sh", ".md", ".toml"}
# What is dated, or speaks of the words themselves.
SKIPPED = ("bench/results/", "docs/experiments/", "docs/glossary.md", "CHANGELOG.md", "tools/lint/")
# Lines that keep an old public name for a release.
OLD = (
    r"deprecated|renamed_|@ranged|old_options|OldName|sms is now|_RENAMED"
    r"|python/ferry/(errors|__init__)"
)

# The word to use; below it patterns of whole words that it replaces. "in": only in these paths;
# "but": not in such lines ("path: text"), OLD for the pattern above.
REPLACED = r"""
poll
    [Ll]ooks?(?= ?[(){};=%&]| \+=|\+\+)  in (src|tests/cuda|tests/model)/
    kLook\w*|looked(?= [=>-]|;)|look(s|ed)?_  in (src|tests|tools)/
    ([Ff]irst|last|next|each|every|two) looks?|looks? (again|once|twice)
    (who|that|which|threads?|kernels?|peers?) looks(?! (like|for|after|up|at|alive|slow))
SpinDeadline, spin_time or timeout
    k?[Pp]atien(ce|t)_?|PATIENCE
WaitStatus
    Came
offender
    [Ll]iars?
protocol violation
    distrust\w*|(a|this|that|the) lie(?= is|[.;])|lied|lie(?= [=;])|[&(]lie
isolated
    deaf
failure broadcast
    [Ff]ailure notices?|Notice(s|Traits|Model)?|notices_?  in src/(?!bootstrap/|base/)|tests/model/
heartbeat
    [Pp]ulses?_?
evicted
    k?[Ll]eft_?[Bb]ehind|[Rr]anks? (was|were) left behind  but OLD
endpoint
    Lanes?|lanes?  in src/(fabric|bootstrap|protocol|engine)/|docs/(network|design/domains)
destination
    [Ll]anes?  in src/(core/(crossing|exchange_plan)|host/(domains|throughput)/)
    (Device|Token)Lanes?|LaneWords|lane_(offset|count|at)|lanes_of\w*|push_lanes
endpoint set, or rail
    [Bb]undles?_?
handshake
    [Gg]reet(s|ed|ings?)?_?
pre-announced
    [Tt]old ahead|tells? ahead|SignalsAhead
way key
    [Tt]okens?_?(?= of a way)|way_token|to_token|from_token  in src/fabric/
LL
    kFew(Tokens|Rows)?|few_rows?|is_few|fews|TaggedWords  in (src|tests)/cuda/
LL128
    k?[Ll]ined|rows? in lines  in (src|tests)/cuda/|docs/
parity
    half\(\)|size_t half|hal(f|ves) of the buffers?  in (src|tests)/cuda/
pair of words
    [Hh]alf[ -](a )?vectors?|load_half  in (src|tests)/cuda/
low or high bits
    (lower|upper|low|high) half  in src/
portion
    [Pp]ieces?_?  in src/core/crossing_l|src/cuda/domains/|src/engine/proxy|docs/design/domains
domain, instead of the line between two
    (across|beyond|over) the line
staging, staging buffer
    Stage(Layout|Shape|Blocks|Row)|DomainStage|first_stage_row
    (in|into|of|through) (its|a|this rank's) stage  in src/(core|host|engine|cuda/domains)/
    StageRounds|kStage(Depth|Unit)
    stages?_?  in src/host/collectives/
FlagArray, array of flags
    FlagRow|flag_row|rows? of flags
formats, instead of the plan of codes
    CodePlan|last_plan
a field of ExchangeTerms, LatencyTerms or CollectiveTerms
    (?<=[.>]call\.)(columns|scale_columns|topk|order|crossing|routes|weights|plan)  in (src|tests)/
num_sms
    sms_?(?!")  in (include|src|python/(ferry|src))/  but OLD|_sms
max_recv_rows
    worst_case_rows  but OLD
wait_ns
    (?<=options\.)waits|waits(?==)  but OLD
MemoryStats, TimeStats, NetworkStats, NicStats
    (Memory|Time|Network|Nic)Use  but OLD
FERRY_LATENCY_LL128
    FERRY_LATENCY_LINES  but ll128_switch|its older name
"""


def texts(root: Path, names: Iterable[Path]) -> dict[str, str]:
    """What is searched: the text of those of the files that speak, by path."""
    spoken = [n for n in names if n.suffix in SUFFIXES and not n.as_posix().startswith(SKIPPED)]
    return {name.as_posix(): (root / name).read_text(encoding="utf-8") for name in spoken}


def replaced(use: str, row: str, files: dict[str, str]) -> Iterator[str]:
    cells = re.split(r"  (in|but) ", row.strip())
    extra = dict(zip(cells[1::2], cells[2::2], strict=True))
    word, where = re.compile(rf"(?:{cells[0]})(?!\w)"), re.compile(extra.get("in", ""))
    for name in filter(where.match, files):
        for found in word.finditer(files[name]):
            before = files[name][: found.start()]
            line = before.rpartition("\n")[2] + files[name][found.start() :].partition("\n")[0]
            kept = "but" in extra and re.search(extra["but"].replace("OLD", OLD), f"{name}: {line}")
            if not kept and not re.search(r"\w$", before[-1:]):  # in `word` it would be slow
                yield f"{name}:{before.count(chr(10)) + 1}: {found[0]!r}: use {use}"


def check(files: dict[str, str]) -> list[str]:
    """One entry for each replaced word that is back."""
    found: list[str] = []
    use = ""
    for row in REPLACED.strip().splitlines():
        if row.startswith(" "):
            found += replaced(use, row, files)
        else:
            use = row
    return found


def glossary() -> list[str]:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    return ", ".join(re.findall(r"(?m)^\| \*\*(.+?)\*\*", page)).split(", ")


def places(word: str, files: dict[str, str]) -> list[tuple[str, str]]:
    """Lines with the word or its plural, in prose and in identifiers of any style."""
    parts = [rf"[{part[0].upper()}{part[0].lower()}]{part[1:]}" for part in re.split("[ -]", word)]
    begins = "(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    whole = re.compile(rf"{begins}{'[ _-]?'.join(parts)}(?:s|es)?(?![a-z])")
    return [
        (name, f"{name}:{number}: {line.strip()}")
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if whole.search(line)
    ]


def main() -> int:
    files, listed = texts(ROOT, lint.files()), sys.argv[1:2] == ["--list"]
    faults = [] if listed else check(files)
    print("".join(fault + "\n" for fault in faults), end="")
    for word in sys.argv[2:] or glossary():
        used = places(word, files)
        print(f"{word:20} {len(used):5} lines in {len({name for name, _ in used}):3} files")
        print("".join(f"  {place}\n" for _, place in used if listed), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    import lint  # which imports this file

    sys.exit(main())
