"""Conversations to token ids, with a supervision mask that is verified for every row.

A chat template renders a conversation; it does not say which part the model writes. For an assistant turn i:

    P = the messages before it, with the generation prompt    what the model is given
    F = the messages up to and including it                   what it should have written is F without P
    W = the whole conversation                                what is trained on

The supervised text is F without P, up to and including the token that ends the turn. P must be a prefix of F, and F up
to that token a prefix of W; every text that the row wants supervised must be in it. A row that fails a check raises an
`EncodingError`. Tokens come from one tokenisation of W, by character offsets.

Not covered: images and audio; text that spells an end-of-turn token, which is refused, because the tokenizer would
read it as one.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from deftune.artifacts.templates import resolve_template
from deftune.data.end_tokens import end_tokens_of
from deftune.data.examples import IGNORE_INDEX, Encoded, Examples
from deftune.data.rendering import Template
from deftune.data.rows import BadRow, BadRowList, BadRows, Row, raw_text
from deftune.data.sandbox import TemplateLimitError
from deftune.data.written import EncodingError, check_written, divergence, snippet, strings_in

Mask = Literal["assistant", "completion", "all"]
Overlong = Literal["truncate", "drop"]

ENOUGH_ENDS = 0.9  # below this share of rows that end their answer, a model may not learn to stop
NAMED_PLACES = 5  # of dropped rows, for each reason


class Encoder:
    """Rows to `Encoded`, by one tokenizer, one template and one mask.

    ``mask``: ``assistant`` supervises every assistant turn, ``completion`` the last one, ``all`` every token.
    ``overlong``: what `encode_rows` does with a row over ``max_length`` tokens; ``truncate`` keeps the head.
    ``end_tokens``: tokens that end a turn, beside the tokenizer's EOS and `END_OF_TURN`.
    ``template_options``: passed to the template, such as ``{"enable_thinking": False}``.
    ``bos``: whether an example begins with BOS; None does what the tokenizer does. Never twice.
    ``now``: the time, perhaps in ISO 8601, that a template writes which writes the date; by default that of this call.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        mask: Mask = "assistant",
        max_length: int,
        overlong: Overlong = "truncate",
        end_tokens: Sequence[str] = (),
        template_options: Mapping[str, Any] | None = None,
        bos: bool | None = None,
        now: datetime | str | None = None,
    ):
        if mask not in get_args(Mask):
            raise ValueError(f"unknown mask {mask!r}. Known: {', '.join(get_args(Mask))}")
        if overlong not in get_args(Overlong):
            raise ValueError(f"unknown overlong {overlong!r}. Known: {', '.join(get_args(Overlong))}")
        if max_length < 2:
            raise ValueError(f"max_length: a token and its target need at least 2, got {max_length}")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; load it with use_fast=True")
        self.template = resolve_template(tokenizer, template)
        self.mask: Mask = mask
        self.max_length = max_length
        self.overlong: Overlong = overlong
        self.template_options = dict(template_options or {})
        special: Mapping[str, Any] = tokenizer.special_tokens_map
        self._variables = {
            **{name: token if isinstance(token, list) else str(token) for name, token in special.items()},
            **self.template_options,
        }
        self._eos: str | None = tokenizer.eos_token
        self.now = datetime.fromisoformat(now) if isinstance(now, str) else now or datetime.now()
        self._compiled: Template | None = None
        self.end_ids = end_tokens_of(tokenizer, self.template, end_tokens)
        self._end = re.compile("|".join(re.escape(token) for token in self.end_ids) or r"(?!)")
        # the tokens that close a turn, and whitespace: of "<|end|>\n<|endoftext|>" the first ends the turn
        self._closing = re.compile(rf"(?:(?:{self._end.pattern})\s*)+\Z")
        self._bos = _bos_id(tokenizer, bos)
        # without its post-processor, which adds special tokens and may trim the space off a token's offsets
        self._backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.post_processor = None
        self._backend.no_truncation()
        self._backend.no_padding()

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of all that a row's tokens and labels depend on besides the row and the code."""
        options = [self.mask, self.max_length, self.overlong, self._bos, self._eos, self.end_ids, self._variables]
        content = json.dumps([self._backend.to_str(), self.template, options], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def depends_on_the_date(self) -> bool:
        """Whether the template may write today's date: the same row is then encoded differently tomorrow."""
        return "strftime_now" in self.template

    def encode(self, row: Row) -> Encoded:
        """The row's tokens and labels, cut to ``max_length``. A row without an assistant turn has no labels."""
        self._refuse_end_tokens(row)
        whole = self._render(row, row.messages, prompt=False)
        if self.mask == "all":
            whole, spans = self._everything(row, whole)
            turns: list[int] = []
        else:
            turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
            if self.mask == "completion":
                turns = turns[-1:]
            spans: list[tuple[int, int]] = []
            for i in turns:
                whole, span = self._span(row, i, whole)
                spans.append(span)
        check_written(row, whole, dict(zip(turns, spans)))
        input_ids, offsets = self._tokenize(whole)
        labels, straddled = self._labels(row, whole, spans, input_ids, offsets)
        return Encoded(
            input_ids=input_ids[: self.max_length],
            labels=labels[: self.max_length],
            where=row.where,
            source=row.source,
            truncated=max(0, len(input_ids) - self.max_length),
            straddled=straddled,
        )

    def encode_prompt(self, row: Row) -> list[int]:
        """What a model trained on this row is given to answer: its messages before the last assistant turn.

        The head of what `encode` returns, unless the tokenizer splits the end of the prompt by what follows it.
        """
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        messages = row.messages[: turns[-1]] if turns else row.messages
        return self._tokenize(self._render(row, messages, prompt=True))[0]

    def _render(self, row: Row, messages: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        try:
            if self._compiled is None:
                self._compiled = Template(self.template, self.now)
            return self._compiled.render(
                messages, tools=row.tools or None, add_generation_prompt=prompt, variables=self._variables
            )
        except TemplateLimitError as error:  # the template's fault, whatever the row
            raise TemplateLimitError(
                f"{row.where}: the chat template was stopped: it makes {error}, which no conversation needs; it is "
                f"broken or hostile: set data.template to another"
            ) from None
        except Exception as error:  # a template raises whatever it likes
            roles = ", ".join(str(message["role"]) for message in messages) or "none"
            raise EncodingError(
                row.where,
                f"the chat template fails on these messages (roles: {roles}): {error}; "
                f"fix the row or set data.template to another",
            ) from error

    def _span(self, row: Row, turn: int, whole: str) -> tuple[str, tuple[int, int]]:
        """Where in ``whole`` the turn's supervised text is; ``whole`` itself, with EOS if the template writes none."""
        prompt = self._render(row, row.messages[:turn], prompt=True)
        last = turn == len(row.messages) - 1
        full = whole if last else self._render(row, row.messages[: turn + 1], prompt=False)
        if not full.startswith(prompt):
            at = divergence(prompt, full)
            raise EncodingError(
                row.where,
                f"turn {turn}: the template prompts the model with {snippet(prompt[at:])} where it writes the "
                f"finished turn as {snippet(full[at:])}, so no answer can follow its prompt; give the turn's "
                f"reasoning, pass template_options such as enable_thinking=False, or set data.template to another",
            )
        closing = self._closing.search(full, len(prompt))
        stop = closing.start() if closing else len(full)
        if not whole.startswith(full[:stop]):
            at = divergence(whole, full)
            raise EncodingError(
                row.where,
                f"turn {turn}: the template rewrites this turn once others follow "
                f"({snippet(full[at:])} becomes {snippet(whole[at:])}), so what the model should write is not in the "
                f"rendered conversation; use mask=completion (one row per answer supervises them all), or supply "
                f"reasoning only in the last turn",
            )
        end = self._end.match(whole, stop)
        if end:
            return whole, (len(prompt), end.end())
        if last and not self._end.search(full, len(prompt)):
            whole = self._with_eos(row, whole)
            return whole, (len(prompt), len(whole))
        raise EncodingError(
            row.where,
            f"turn {turn}: no end-of-turn token after {snippet(full[:stop][-24:])}, so the model would not learn "
            f"to stop; declare the template's own in end_tokens if it is one token of this tokenizer, set "
            f"data.template to one that ends every answer with such a token (plain does), or use mask=completion",
        )

    def _everything(self, row: Row, whole: str) -> tuple[str, list[tuple[int, int]]]:
        closing = self._closing.search(whole)
        end = closing and self._end.match(whole, closing.start())
        if not end:
            whole = self._with_eos(row, whole)
        return whole, [(0, end.end() if end else len(whole))]

    def _with_eos(self, row: Row, whole: str) -> str:
        if self._eos is None:
            raise EncodingError(
                row.where,
                "the template ends no turn with an end-of-turn token and the tokenizer has no EOS; "
                "set tokenizer.eos_token, or declare the template's own in end_tokens",
            )
        return whole + self._eos

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        input_ids, offsets = encoding.ids, encoding.offsets
        if self._bos is not None and input_ids[:1] != [self._bos]:
            return [self._bos, *input_ids], [(0, 0), *offsets]
        return input_ids, offsets

    def _labels(
        self,
        row: Row,
        whole: str,
        spans: Sequence[tuple[int, int]],
        input_ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
    ) -> tuple[list[int], int]:
        """A token is supervised where it begins in a span; how many begin before one and end in it."""
        labels = [IGNORE_INDEX] * len(input_ids)
        ends, straddled, index = set(self.end_ids.values()), 0, 0
        for start, stop in spans:
            last = None
            while index < len(offsets) and offsets[index][0] < stop:
                begins, finishes = offsets[index]
                if begins >= start:
                    labels[index] = last = input_ids[index]
                elif finishes > start:
                    straddled += 1
                index += 1
            if last not in ends:
                got = "no token" if last is None else repr(self._backend.id_to_token(last))
                raise EncodingError(
                    row.where,
                    f"the answer {snippet(whole[start:stop])} should be supervised up to its end-of-turn token, "
                    f"but its tokens end in {got}; the tokenizer merges text across the template's boundaries",
                )
        labels[:1] = [IGNORE_INDEX]  # nothing comes before the first token
        return labels, straddled

    def _refuse_end_tokens(self, row: Row) -> None:
        values = [value for message in row.messages for key, value in message.items() if key != "role"]
        for text in strings_in([*values, *(row.tools or ())]):
            found = self._end.search(text)
            if found:
                raise EncodingError(
                    row.where,
                    f"the text spells the end-of-turn token {found[0]} (in {snippet(text[found.start() :][:24])}), "
                    f"which would be read as the end of a turn; remove it from the row or pass --skip-bad-rows",
                )


@dataclass
class Places:
    """How many rows were dropped for one reason, and where the first of them are."""

    count: int = 0
    first: list[str] = field(default_factory=list[str])

    def add(self, where: str) -> None:
        self.extend(Places(1, [where]))

    def extend(self, other: Places) -> None:
        self.count += other.count
        self.first += other.first[: NAMED_PLACES - len(self.first)]

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more:,} more" if more else "")


@dataclass
class EncodedRows:
    """The examples to train on, and the places of the rows that were dropped, by reason."""

    max_length: int
    examples: Examples = field(default_factory=Examples)
    num_rows: int = 0
    num_ended: int = 0  # examples whose last supervised token ends a turn
    fully_truncated: Places = field(default_factory=Places)  # over max_length, and no answer left
    overlong: Places = field(default_factory=Places)  # over max_length, dropped on request
    fully_masked: Places = field(default_factory=Places)  # nothing to supervise, at any length
    refused: BadRowList = field(default_factory=BadRowList)  # their mask cannot be verified

    def extend(self, other: EncodedRows) -> None:
        """Append the result of the rows that follow."""
        self.num_rows += other.num_rows
        self.num_ended += other.num_ended
        self.examples.extend(other.examples)
        self.fully_truncated.extend(other.fully_truncated)
        self.overlong.extend(other.overlong)
        self.fully_masked.extend(other.fully_masked)
        self.refused.extend(other.refused)

    @property
    def num_dropped(self) -> int:
        return self.num_rows - len(self.examples)

    def facts(self) -> list[str]:
        """The lines that a run prints first: the counts, then the places of dropped rows."""
        fates = [
            (self.fully_truncated, f"over {self.max_length} tokens with no answer left"),
            (self.overlong, f"over {self.max_length} tokens"),
            (self.fully_masked, "fully masked"),
            (Places(len(self.refused), [row.where for row in self.refused[:NAMED_PLACES]]), "refused"),
        ]
        fates = [(places, fate) for places, fate in fates if places.count]
        counts = ", ".join(f"{places.count:,} {fate}" for places, fate in fates)
        examples = self.examples
        kept, tokens, supervised = len(examples), examples.num_tokens, examples.num_supervised
        lines = [
            f"{self.num_rows:,} rows; {self.num_dropped:,} dropped" + (f": {counts}" if counts else ""),
            f"{examples.num_truncated:,} truncated ({_percent(examples.num_truncated, kept)}); "
            f"{_short(tokens)} tokens, {_short(supervised)} supervised ({_percent(supervised, tokens)}); "
            f"EOS supervised in {_percent(self.num_ended, kept)}",
        ]
        if self.num_ended < ENOUGH_ENDS * kept:
            lines.append(self._few_ends())
        if examples.num_straddled:
            lines.append(f"{examples.num_straddled:,} tokens straddle a prompt and its answer: not supervised")
        return lines + [f"dropped, {fate}: {places}" for places, fate in fates]

    def _few_ends(self) -> str:
        """The warning that many answers lack their end-of-turn token: those were cut at max_length."""
        kept = len(self.examples)
        needed = self.examples.length_of_share(ENOUGH_ENDS)
        return (
            f"WARNING: only {_percent(self.num_ended, kept)} of the rows teach the model to end its answer: the others "
            f"are cut off at data.max_length={self.max_length}; set data.max_length to {needed} "
            f"(keeps {ENOUGH_ENDS:.0%} of the rows whole), or data.overlong to drop (leaves the long ones out)"
        )


def encode_rows(rows: Iterable[Row], encoder: Encoder, *, bad: BadRows | None = None) -> EncodedRows:
    """Encode every row in this process; `deftune.data.parallel.encode_packed` uses several.

    ``bad`` says what becomes of rows whose mask cannot be verified: by default the first one raises `EncodingError`;
    with ``BadRows(skip=True)`` all of them are added to ``bad`` and listed in ``refused``.
    """
    bad = BadRows() if bad is None else bad
    return checked(encode_part(rows, encoder, skip=bad.skip), encoder, bad)


def encode_part(rows: Iterable[Row], encoder: Encoder, *, skip: bool) -> EncodedRows:
    """Encode some of the rows; the result may have no example.

    Raises:
        EncodingError: the mask of a row cannot be verified, and such rows are not to be skipped.
    """
    result = EncodedRows(encoder.max_length)
    ends = set(encoder.end_ids.values())
    for row in rows:
        result.num_rows += 1
        try:
            example = encoder.encode(row)
        except EncodingError as error:
            if not skip:
                raise
            fields = {"messages": row.messages, **({"tools": row.tools} if row.tools else {})}
            result.refused.append(BadRow(row.where, "mask not verified", error.problem, raw_text(fields)))
            continue
        if example.truncated and encoder.overlong == "drop":
            result.overlong.add(row.where)
        elif example.num_supervised:
            result.examples.append(example)
            result.num_ended += next(i for i in reversed(example.labels) if i != IGNORE_INDEX) in ends
        elif example.truncated:
            result.fully_truncated.add(row.where)
        else:
            result.fully_masked.add(row.where)
    return result


class NoExamples(ValueError):
    """No row has a supervised token; the message says why."""


def checked(result: EncodedRows, encoder: Encoder, bad: BadRows) -> EncodedRows:
    """The result, with its refused rows added to ``bad``; a result without any example is an error."""
    if not result.examples:
        raise NoExamples(_nothing_left(result, encoder))
    bad.extend(result.refused)
    return result


def _nothing_left(result: EncodedRows, encoder: Encoder) -> str:
    if not result.num_rows:
        return "no rows to encode; check path, split and limit of the data"
    advice: list[str] = []
    if result.fully_truncated.count or result.overlong.count:
        advice.append(f"raise max_length (now {encoder.max_length}) or shorten the prompts")
    if result.fully_masked.count:
        advice.append(f"mask={encoder.mask} needs rows with an assistant turn: check their roles, or use mask=all")
    if result.refused:
        advice.append(f"the first refused row says: {result.refused[0].where}: {result.refused[0].detail}")
    return f"no row has a supervised token left ({result.facts()[0]}); {'; '.join(advice)}"


def _bos_id(tokenizer: Any, wanted: bool | None) -> int | None:
    bos: int | None = tokenizer.bos_token_id
    if wanted and bos is None:
        raise ValueError("bos=True, but the tokenizer has no BOS token; set tokenizer.bos_token or leave bos out")
    if wanted is None:
        wanted = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return bos if wanted else None


def _percent(part: int, whole: int) -> str:
    """Rounded, but 100% only where it is all of them and 0% only where it is none."""
    if not whole or part in (0, whole):
        return "100%" if part and part == whole else "0%"
    share = 100 * part / whole
    return f"{min(max(share, 0.1), 99.9):.1f}%" if share < 10 or share > 99 else f"{share:.0f}%"


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{name}" if count < 10 * unit else f"{count // unit:,}{name}"
    return str(count)
