"""Read a shell script: its commands, with quotes, comments and variables resolved. Nothing is executed.

Example: after `SIZE=7`, the line `python train.py --model "Qwen-${SIZE}B" --out $DIR` has the words `python`,
`train.py`, `--model`, `Qwen-7B`, `--out` and `${DIR}`. The last word has an unfilled variable, `${DIR}`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from rl_vlm.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(
    r"\$(?:(?P<plain>\w+|[@*#?!$-])|\{(?P<name>\w+)(?::?-(?P<default>[^${}]*))?\}|\{(?P<other>[^}]*)\})"
)
PLACEHOLDER = re.compile(r"<[A-Za-z][\w./ -]*>")
"""A part that users of a published script replace, such as `<your_image_root>`."""
REDIRECTION = re.compile(r"(?:[0-9]+|&)?(?:>>|>|<)[ \t]*&?[^\s;|&]*")
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
END = re.compile(r"&&|\|\||[\n;|&]")
ESCAPED = re.compile(r"\\(\r?\n|.)", re.DOTALL)
ESCAPED_IN_QUOTES = re.compile(r"\\(\r?\n|[\\\"$`])")
PLAIN = re.compile(r"[^\s\\'\"`$<>;|&]+")
PLAIN_IN_QUOTES = re.compile(r"\\|[^\\\"`$]+")
SETS_VARIABLES = ("export", "declare", "local", "readonly")


class Word(NamedTuple):
    """A word of a command, after the shell's expansion."""

    text: str
    line: int
    unfilled: tuple[str, ...] = ()
    """Parts of the text without a known value, such as `${NAME}`."""


@dataclass
class Command:
    """A command, with the variables that are set for it alone, as in `NAME=value program`."""

    line: int
    words: list[Word] = field(default_factory=list)
    environment: dict[str, Word] = field(default_factory=dict)

    def variables(self, programs: Collection[str]) -> dict[str, Word]:
        """Return the variables that it sets, if its program is one of these, such as `export`."""
        if not self.words or self.words[0].text not in programs:
            return {}
        return dict(pair for word in self.words[1:] if (pair := assigned(word)))


class Script:
    """Reads the text of a script from its beginning to its end, and keeps the variables that it sets."""

    def __init__(self, text: str, path: str) -> None:
        self.variables: dict[str, Word] = {}
        self._text, self._path, self._position = text, path, 0
        self._counted = (0, 1)  # a position, and its line

    def commands(self) -> list[Command]:
        """Return the commands in order. Raises ConfigError if a quote does not close."""
        found = []
        while self._position < len(self._text):
            command = self._command()
            self.variables |= {} if command.words else command.environment
            self.variables |= command.variables(SETS_VARIABLES)
            if command.words or command.environment:
                found.append(command)
        return found

    def _command(self) -> Command:
        """Read one command, which ends with its line or with `;`, `|` or `&`."""
        command = Command(self._line())
        while self._position < len(self._text):
            if self._match(BLANK):
                continue
            if self._text[self._position] == "#":
                self._match(re.compile("[^\n]*"))
            elif self._text.startswith("<<", self._position):
                raise ConfigError(f"{self._place()}: a here-document (`<<`) is not read; leave it out")
            elif not PLACEHOLDER.match(self._text, self._position) and self._match(REDIRECTION):
                continue
            elif self._match(END):
                break
            else:
                command.line = command.line if command.words or command.environment else self._line()
                self._read_word(command)
        return command

    def _read_word(self, command: Command) -> None:
        """Read a word into the command. An unquoted variable whose value has spaces makes several words."""
        line, texts, unfilled, is_quoted = self._line(), [""], [], False
        while self._is_in_word():
            first = self._text[self._position]
            is_quoted |= first in "'\""
            if first in "$`" and command.words:
                value = self._expanded(unfilled)
                one, *others = [value] if value in unfilled else value.split(" ")
                texts = [*texts[:-1], texts[-1] + one, *others]
            else:
                texts[-1] += self._part(unfilled)
        for text in texts:
            word = Word(text, line, tuple(name for name in dict.fromkeys(unfilled) if name in text))
            if not command.words and (pair := assigned(word)):
                command.environment |= dict([pair])
            elif text or is_quoted:
                command.words.append(word)

    def _is_in_word(self) -> bool:
        rest = self._text[self._position : self._position + 1]
        return (bool(rest) and not re.match(r"[\s;|&<>]", rest)) or bool(PLACEHOLDER.match(self._text, self._position))

    def _part(self, unfilled: list[str]) -> str:
        """Read a part of a word: quoted, escaped, plain, a variable or a placeholder."""
        if self._text.startswith('"', self._position):
            return self._quoted(unfilled)
        if self._text.startswith("'", self._position):
            return self._literal()
        if self._text[self._position] in "$`":
            return self._expanded(unfilled)
        if escaped := self._match(ESCAPED):
            return "" if escaped[1].endswith("\n") else escaped[1]
        if plain := self._match(PLAIN):
            return plain[0]
        if placeholder := self._match(PLACEHOLDER):
            unfilled.append(placeholder[0])
            return placeholder[0]
        self._position += 1  # a backslash that ends the file
        return "\\"

    def _literal(self) -> str:
        """Read a part in single quotes."""
        closing = self._text.find("'", self._position + 1)
        if closing < 0:
            raise ConfigError(f"{self._place()}: the quote ' does not close")
        start, self._position = self._position + 1, closing + 1
        return self._text[start:closing]

    def _quoted(self, unfilled: list[str]) -> str:
        """Read a part in double quotes."""
        place, parts = self._place(), []
        self._position += 1
        while self._position < len(self._text):
            if self._match(re.compile('"')):
                return "".join(parts)
            if escaped := self._match(ESCAPED_IN_QUOTES):
                parts.append("" if escaped[1].endswith("\n") else escaped[1])
            elif plain := self._match(PLAIN_IN_QUOTES):
                parts.append(plain[0])
            else:
                parts.append(self._expanded(unfilled))
        raise ConfigError(f'{place}: the quote " does not close')

    def _expanded(self, unfilled: list[str]) -> str:
        """Read a variable or a command substitution, and return its value. Add it to `unfilled` if it has none."""
        if self._text.startswith(("$(", "`"), self._position):
            unfilled.append(self._substitution())
            return unfilled[-1]
        found = self._match(VARIABLE)
        if found is None:  # a dollar sign alone
            self._position += 1
            return "$"
        name = found["plain"] or found["name"] or found["other"]
        value = None if found["other"] else self.variables.get(name)
        if value is None and found["default"] is not None:
            return found["default"].strip("'\"")
        if value is None or any(part.startswith(("$(", "`")) for part in value.unfilled):
            unfilled.append(f"${{{name}}}")
            return unfilled[-1]
        unfilled.extend(value.unfilled)
        return value.text

    def _substitution(self) -> str:
        """Read `$(…)` or a command in backquotes, without running it."""
        place, start = self._place(), self._position
        if self._text[start] == "`":
            end = self._text.find("`", start + 1) + 1
        else:
            depths = [0]
            for match in re.finditer(r"[()]", self._text[start:]):
                depths.append(depths[-1] + (1 if match[0] == "(" else -1))
                if depths[-1] == 0:
                    break
            end = start + match.end() if depths[-1] == 0 else 0
        if end <= start:
            raise ConfigError(f"{place}: {self._text[start : start + 2]} does not close")
        self._position = end
        return self._text[start:end]

    def _line(self) -> int:
        position, line = self._counted
        self._counted = (self._position, line + self._text.count("\n", position, self._position))
        return self._counted[1]

    def _place(self) -> str:
        return f"{self._path}: line {self._line()}"

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern at the position, and move to the end of the match."""
        match = pattern.match(self._text, self._position)
        self._position = match.end() if match else self._position
        return match


def assigned(word: Word) -> tuple[str, Word] | None:
    """Return the name and the value of an assignment `NAME=value`, or None for any other word."""
    match = ASSIGNMENT.fullmatch(word.text)
    return (match[1], word._replace(text=match[2])) if match else None
