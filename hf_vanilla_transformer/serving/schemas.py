"""The bodies of requests and answers. `/openapi.json` and `/docs` describe these models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ..text.cells import text_of

_Text = Annotated[str, BeforeValidator(lambda text: text_of(text, "the text") or "")]


class _Request(BaseModel):
    api_key: Any = Field(
        None,
        description="the key of the server, if it has one and the request has no bearer token",
    )


class TranslateRequest(_Request):
    """The body of `POST /translate`. Unknown fields are ignored, as LibreTranslate ignores them."""

    q: str | list[_Text] = Field(description="a text, or in JSON a list of texts")
    source: str = Field(min_length=1, description="a language code of GET /languages, or auto")
    target: str = Field(min_length=1, description="a language code of GET /languages")
    format: Literal["text", "html"] = Field("text", description="text or html; HTML keeps its tags")
    alternatives: int = Field(
        0, ge=0, description="most further translations. The server's beams may give fewer"
    )


class DetectedLanguage(BaseModel):
    """A language of the server, and its probability in percent."""

    confidence: float
    language: str


class TranslateAnswer(BaseModel):
    """Translations: strings if `q` is a string, lists if it is a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="the next best translations, if asked"
    )
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = Field(
        None, description="if source is auto"
    )
    warnings: list[str] | None = Field(
        None,
        description="sentences that were cut, unknown symbols, and translations without an end",
    )


class PredictRequest(_Request):
    """The body of `POST /predict`. Unknown fields are ignored."""

    q: str | list[_Text] = Field(description="a sequence, or in JSON a list of sequences")
    n_best: int = Field(
        1, ge=1, description="most predictions of each sequence, at most the server's beams"
    )


class Prediction(BaseModel):
    """A predicted sequence."""

    text: str
    score: float | None = Field(
        description="log-probability over the length penalty, null with one beam"
    )
    probability: float = Field(description="its share among the predictions of the sequence")


class PredictAnswer(BaseModel):
    """Predictions, best first: a list if `q` is a string, a list of lists if it is a list."""

    predictions: list[Prediction] | list[list[Prediction]]
    unknown: list[str] | list[list[str]] | None = Field(
        None,
        description="the symbols of each sequence that the model does not know, if its vocabulary is closed",
    )
    warnings: list[str] | None = Field(
        None,
        description="unknown symbols, sequences not in the model's form, and predictions without an end",
    )


class DetectRequest(_Request):
    """The body of `POST /detect`."""

    q: str = Field(description="a text")


class FileRequest(_Request):
    """The form of `POST /translate_file`."""

    file: Any = Field(description="a document, with the suffix of its format")
    source: str = Field(min_length=1, description="a language code of GET /languages, or auto")
    target: str = Field(min_length=1, description="a language code of GET /languages")


class PageRequest(_Request):
    """The body of `POST /page/translate`."""

    text: str = Field(description="a text")
    caret: int | None = Field(
        None, ge=0, description="position in the text. The answer shows the input there in detail"
    )
    num_beams: int | None = Field(None, ge=1, description="beam size (default: the server's)")
    alternatives: int = Field(5, ge=1, description="number of alternatives to each token")
    prefix: list[int] = Field([], description="token ids that the output starts with")
    inside: bool = Field(
        False, description="add attention scores, lengths of residual streams and position vectors"
    )


class Language(BaseModel):
    """A language and its target languages."""

    code: str
    name: str
    targets: list[str]


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 4xx or 5xx."""

    error: str = Field(description="one line that names the field")
