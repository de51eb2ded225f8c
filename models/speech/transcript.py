"""Transcripts: segments with times, as text, SRT, WebVTT or JSON."""
import dataclasses
from typing import NamedTuple

from ggjit.core.html_repr import escape


@dataclasses.dataclass
class Segment:
    """A stretch of text.  start, end: seconds; text: as the model wrote it, with the space before it; tokens: with the
    times around them; words: [Word] where they were asked for; the rest: of the window it was written in."""
    id: int
    start: float
    end: float
    text: str
    tokens: list
    words: list = dataclasses.field(default_factory=list)
    temperature: float = 0.0
    mean_logp: float = 0.0
    compression_ratio: float = 0.0
    no_speech: float = 0.0

    def as_dict(self):
        out = dataclasses.asdict(self)
        out["words"] = [{"word": w.word, "start": w.start, "end": w.end, "probability": w.probability}
                        for w in self.words]
        return out


class Language(NamedTuple):
    """Which language is spoken: a code, its probability, and {code: probability} of all."""
    language: str
    probability: float
    probabilities: dict


class Transcript:
    """Iterate over the segments as they come, or take all: `.text`, `.segments`, `.language`, `.to_srt()`.

    for segment in m.transcribe("talk.wav"):
        print(segment.start, segment.text)

    language: its code; languages: a Language, where it was detected; seconds: of the recording; notes: what was done
    to it before it was heard.
    """

    def __init__(self, name, seconds, notes, found, segments):
        """found: Language; segments: an iterator of Segment, which is run as far as its segments are read."""
        self.name, self.seconds, self.notes, self.languages = name, seconds, notes, found
        self.language = found.language
        self._coming, self._known, self.task = segments, [], "transcribe"

    def __iter__(self):
        i = 0
        while i < len(self._known) or self._more():
            yield self._known[i]
            i += 1

    def _more(self):
        segment = next(self._coming, None)
        if segment is not None:
            self._known.append(segment)
        return segment is not None

    @property
    def segments(self):
        """All segments as a list; the rest of the sound is transcribed first."""
        while self._more():
            pass
        return self._known

    @property
    def text(self):
        return "".join(s.text for s in self.segments).strip()

    @property
    def words(self):
        """The words of all segments."""
        return [w for s in self.segments for w in s.words]

    def as_dict(self):
        """The values for JSON."""
        return {"text": self.text, "language": self.language, "language_probability": self.languages.probability,
                "audio_seconds": self.seconds, "notes": list(self.notes),
                "segments": [s.as_dict() for s in self.segments]}

    def to_srt(self, words=False):
        """SubRip subtitles; words: a subtitle for each word."""
        return "\n".join(f"{i}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n"
                         for i, (start, end, text) in enumerate(self._lines(words), 1))

    def to_vtt(self, words=False):
        """WebVTT subtitles; words: a subtitle for each word."""
        return "WEBVTT\n\n" + "\n".join(f"{_clock(start, '.')} --> {_clock(end, '.')}\n{text}\n"
                                        for start, end, text in self._lines(words))

    def _lines(self, words):
        for s in self.segments:
            for x in (s.words if words else [s]):
                yield x.start, x.end, x.text.strip().replace("-->", "->")

    def __repr__(self):
        more = "" if self._coming is None else " so far"
        return f"<Transcript of {self.name}: {self.seconds:.1f} s, {self.language}, {len(self._known)} segments{more}>"

    def _repr_html_(self):
        rows = "".join(f"<tr><td style='text-align:right'>{s.start:.2f} – {s.end:.2f}</td>"
                       f"<td style='text-align:left'>{escape(s.text.strip())}</td></tr>" for s in self.segments)
        return f"<table><tr><th>seconds</th><th style='text-align:left'>{escape(self.language)}</th></tr>{rows}</table>"


def _clock(seconds, point):
    """1.5 -> "00:00:01.500"."""
    ms = round(max(0.0, seconds) * 1000)
    return f"{ms // 3600000:02d}:{ms // 60000 % 60:02d}:{ms // 1000 % 60:02d}{point}{ms % 1000:03d}"
