"""The text of one request as it grows, up to its first stop string."""

from penelope_jax.tokenizer import Detokenizer


class TextStream:
    """Turns output tokens into text that a client may have at once, and finds stop strings.

    A stop string may begin in one token and end in another, and inside a character of several tokens. So text that may
    be its beginning is held back until it is known. Where several are found, the one that begins first counts.

    Give `push` to `Driver.submit` as `watch`, and hand out the text with `take`, whenever it suits; at the end of the
    request call `finish` before the last `take`. A stop string that the very last token allowed completes is found
    too: the request's reason is `length` then, and `stopped_at` says what the text ends before.

    Attributes:
        stopped_at: the stop string that was found; None: none so far.
        num_tokens: tokens pushed.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: tuple[str, ...] = (), *, min_tokens: int = 0):
        """Begins a text.

        Args:
            detokenizer: a new one.
            stop_strings: what ends the text, and is not part of it.
            min_tokens: a stop string that one of the first `min_tokens` tokens completes is text like any other.

        Raises:
            ValueError: a stop string is empty.
        """
        for index, string in enumerate(stop_strings):
            if not string:
                raise ValueError(
                    f"stop string {index} of {len(stop_strings)} is empty; at least 1 character is needed."
                )
        self.stopped_at: str | None = None
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._text = ""  # not taken yet

    def push(self, token: int) -> bool:
        """Adds a token; returns whether the text is over."""
        if self.stopped_at is None:
            self.num_tokens += 1
            self._add(self._detokenizer.push([token]))
        return self.stopped_at is not None

    def take(self) -> str:
        """Returns the text that is final and was not returned before."""
        kept = 0 if self.stopped_at is not None else self._num_held()
        taken, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        return taken

    def finish(self) -> None:
        """Ends the text: what was held back is text after all, unless a stop string is in it."""
        if self.stopped_at is None:
            self._add(self._detokenizer.flush())
            self._stop_strings = ()

    def _add(self, text: str) -> None:
        """Appends text; if a stop string ends in it, cuts all from the stop string on."""
        length = len(self._text)
        self._text += text
        if self.num_tokens <= self._min_tokens:
            return
        found = [
            (place, string)
            for string in self._stop_strings
            if (place := self._text.find(string, max(0, length - len(string) + 1))) >= 0
        ]
        if found:
            place, self.stopped_at = min(found)
            self._text = self._text[:place]

    def _num_held(self) -> int:
        """Returns the length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(string.startswith(self._text[-length:]) for string in self._stop_strings if len(string) > length):
                return length
        return 0
