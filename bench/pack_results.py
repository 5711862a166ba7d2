"""Rewrites files of results for keeping: one record a line, so that a diff shows records.

python bench/pack_results.py bench/results/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def is_flat(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(part, dict | list) for part in parts)


def is_record(value: object) -> bool:
    """Scalars, and lists of them under a key."""
    if isinstance(value, dict):
        return all(is_flat(part) and not isinstance(part, dict) for part in value.values())
    return is_flat(value)


def packed(value: object, indent: str = "") -> str:
    if is_record(value):
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict):
        lines = [
            f"{deeper}{json.dumps(key)}: {packed(item, deeper)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + packed(item, deeper) for item in value) + f"\n{indent}]"


def main() -> int:
    for path in map(Path, sys.argv[1:]):
        value = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(packed(value) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
