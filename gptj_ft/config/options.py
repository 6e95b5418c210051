"""Declare every option of a run: type, default, unit and meaning. Options are declared nowhere else.

The string under a field is its help text, see `meaning_of`; `FlagSpec` describes its flag.

A preset (``recipes/*.yaml``) names only options that differ from these defaults. Order of precedence: flags, the
environment (``GPTJ_FT_LR=1e-5``), a ``--config`` file, the preset, and the defaults below.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

_Place = Literal["device", "host", "disk", "auto"]
Task = Literal[
    "language-model", "classification", "multi-label", "regression", "token-labels", "spans", "sentences"
]  # fmt: skip
Shape = Literal["linear", "cosine", "constant"]
NamedShape = Literal[Shape, "inverse_sqrt"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


def parse_duration(value: object) -> object:
    """Parse a duration such as ``1h30m`` into seconds; return other types unchanged."""
    if not isinstance(value, str):
        return value
    text, total = value.strip().lower(), 0.0
    if not re.fullmatch(r"(\d+\.?\d*[dhms])+|\d+\.?\d*", text):
        raise PydanticCustomError("duration", "expected a duration: seconds, or e.g. 8h, 90m, 1h30m or 2d")
    for number, unit in re.findall(r"([\d.]+)([dhms]?)", text):
        total += float(number) * {"d": 86400, "h": 3600, "m": 60}.get(unit, 1)
    return total


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0.0)]


# Bounds that no run reaches; beyond them, a recipe from somebody else could exhaust the memory or overflow.
MOST_STEPS, MOST_EPOCHS = 10**9, 10**6
MOST_CANARIES, MOST_REPEATS = 250, 10_000
MOST_THREADS, MOST_RANKS = 4096, 10_000
# A thousand times GPT-J's context; published corpora that are one long line are not larger.
MOST_RECORD_BYTES = 256 * 2**20
SIZE_UNITS = {"": 1, "B": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}


def parse_size(value: object) -> object:
    """Parse a size such as ``8GiB`` into bytes; return other types unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", value.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in SIZE_UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise PydanticCustomError("size", "expected a size: bytes, or a number with MB, MiB, GB, GiB, TB or TiB")
    return int(float(match[1]) * units[match[2].lower()])


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


def _switch(value: object) -> object:
    """Return the word that YAML 1.1 read as a boolean; return other types unchanged."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _check_products(value: str) -> str:
    """Check a choice of libraries; `models.products.Products` has its meaning."""
    pair = "(onednn|mkl)(/(onednn|mkl))?"
    if not re.fullmatch(rf"auto|(widened )?{pair}( [0-9]{{1,9}}x[0-9]{{1,9}}={pair})*", value):
        raise ValueError("expected auto, onednn, mkl, or two libraries such as onednn/mkl; or widened and one of these")
    return value


def _words(value: Any) -> Any:
    """Split ``best,last`` or a bare number into a list."""
    return str(value).split(",") if isinstance(value, str | int) else value


def _keep_words(value: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in value)
    wrong = [word for word in words if word not in ("last", "best", "all") and not re.fullmatch("[1-9][0-9]*", word)]
    if wrong or not words:
        raise ValueError("expected last, best, all or a number, separated by commas")
    return words


Keep = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_keep_words)]


Names = Annotated[tuple[str, ...], BeforeValidator(_words)]


Repeats = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MOST_REPEATS)], ...], BeforeValidator(_words), Field(min_length=1)
]


@dataclass(frozen=True)
class FlagSpec:
    """Presentation of an option on the command line: metadata of its field."""

    metavar: str | None = None  # kind of value in help; selects the shell completion
    in_more: bool = False  # shown by --help-all only
    set_by_presets: bool = False  # help names no default, because presets set the option


class Options(BaseModel):
    """Frozen group of options; unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        # YAML reads an unquoted 2024 as a number, also where a name is meant.
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


_NOT_OF_TRANSFORMERS = {"temperature", "top_p", "top_k", "min_p", "stop", "end_tokens", "max_prompt_tokens"}


class Generation(Options):
    """Generation settings: defaults of `evaluate` and `generate`."""

    max_new_tokens: int = Field(128, ge=1, lt=2**31)
    """maximum number of generated tokens"""
    temperature: float = Field(0.0, ge=0.0)
    """0 decodes greedily; above 0 samples"""
    top_p: Annotated[float, FlagSpec(in_more=True)] = Field(1.0, gt=0.0, le=1.0)
    """sample from the smallest set of tokens with this total probability"""
    top_k: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0)
    """sample from the k most likely tokens; 0: all"""
    min_p: Fraction = 0.0
    """sample from tokens with at least this fraction of the top token's probability"""
    num_beams: Annotated[int, FlagSpec(in_more=True)] = Field(1, ge=1)
    """beams of beam search; 1: no beam search"""
    min_new_tokens: int = Field(0, ge=0)
    """minimum number of generated tokens"""
    length_penalty: float = 1.0
    """beam search ranks answers by log-probability / length ** length_penalty"""
    early_stopping: bool | Literal["never"] = False
    """beam search stops when it has num_beams finished answers; false: when a better one is unlikely; never: when
    none is possible
    """
    repetition_penalty: float = Field(1.0, gt=0.0)
    """above 1, tokens of the prompt and the answer become less likely"""
    no_repeat_ngram_size: int = Field(0, ge=0)
    """no sequence of this many tokens occurs twice; 0: no limit"""
    prompt_lookup_num_tokens: int = Field(0, ge=0)
    """guess this many tokens from earlier text and check them in one pass; 0: off"""
    stop: tuple[str, ...] = ()
    """strings that end generation; they are not part of the answer"""
    end_tokens: tuple[str, ...] = ()
    """tokens that end an answer, each a special token of the tokenizer; empty: EOS, and those that the model names"""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """maximum prompt length; a longer prompt loses its end; null: `on_long` and `cut` decide"""

    @model_validator(mode="after")
    def _fits_together(self) -> Generation:
        if self.min_new_tokens > self.max_new_tokens:
            raise PydanticCustomError("tokens", "min_new_tokens must be at most max_new_tokens")
        if self.prompt_lookup_num_tokens and self.num_beams > 1:
            raise PydanticCustomError("lookup", "prompt_lookup_num_tokens cannot be combined with num_beams")
        return self

    def search_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `transformers`' ``generate``."""
        options = self.model_dump(exclude=_NOT_OF_TRANSFORMERS)
        if not self.prompt_lookup_num_tokens:
            del options["prompt_lookup_num_tokens"]
        if self.num_beams == 1:  # transformers would warn about them
            del options["length_penalty"], options["early_stopping"]
        options["do_sample"] = self.temperature > 0
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            options |= {"min_p": self.min_p} if self.min_p else {}
        return options | ({"stop_strings": list(self.stop)} if self.stop else {})


class LoRA(Options):
    """Adapters of ``method: lora`` (https://arxiv.org/abs/2106.09685)."""

    rank: int = Field(16, ge=1)
    """inner dimension of an adapter"""
    alpha: float = Field(32.0, gt=0.0)
    """scale: an adapter's output is multiplied by alpha / rank"""
    rslora: bool = False
    """multiply by alpha / sqrt(rank) instead, for high ranks"""
    dora: bool = False
    """DoRA (https://arxiv.org/abs/2402.09353): also train the norm of each row of an adapted weight"""
    dropout: BelowOne = 0.0
    """fraction of an adapter's inputs dropped in training"""
    targets: Names = ("all-linear",)
    """linear layers with adapters, as shell patterns (q_proj,h.2[0-7].mlp.*); all-linear: those of all blocks;
    empty: attention's queries and values
    """
    merge: bool = False
    """also write the model with the adapter merged into its weights"""


class Sampled(Options):
    """Layers of ``method: sampled`` (LISA, https://arxiv.org/abs/2403.17919)."""

    layers: int = Field(2, ge=1)
    """random blocks trained at a time; 2 as in the paper"""
    period: int = Field(10, ge=1, le=MOST_STEPS)
    """optimizer steps until other blocks are drawn; a run should have many periods"""
    vocabulary_every: int = Field(1, ge=1, le=MOST_STEPS)
    """train embedding and head in every n-th period, from the first; 1: always, as in the paper"""


class SchedulePiece(Options):
    """Piece of an explicit schedule; rates are fractions of ``lr``, like ``final_lr``."""

    shape: Shape
    """curve of the learning rate from start to end"""
    start: Fraction | None = None
    """fraction of lr at the first step of the piece; null: the end of the previous piece, or 0"""
    end: Fraction
    """fraction of lr after the last step of the piece; kept if no piece follows"""
    steps: int = Field(ge=1, le=MOST_STEPS)
    """optimizer steps of the piece"""

    @model_validator(mode="after")
    def _has_one_rate_if_constant(self) -> SchedulePiece:
        if self.shape == "constant" and self.start not in (None, self.end):
            raise PydanticCustomError("constant", "a constant piece has a single rate, `end`")
        return self


def _reaches_the_peak(pieces: tuple[SchedulePiece, ...]) -> tuple[SchedulePiece, ...]:
    if all(1.0 not in (piece.start, piece.end) for piece in pieces):
        raise PydanticCustomError(
            "pieces", "no piece reaches lr: start and end are fractions of lr, so one of all of them must be 1"
        )
    return pieces


Pieces = Annotated[tuple[SchedulePiece, ...], AfterValidator(_reaches_the_peak)]


def _read_map(value: Any) -> Any:
    """Parse ``document=body,summary=tl_dr``."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(field.strip() and equals and column.strip() for field, equals, column in pairs):
        raise PydanticCustomError("map", "expected field=column pairs, e.g. document=body,summary=tl_dr")
    columns: dict[str, str] = {}
    for field, column in ((field.strip(), column.strip()) for field, _, column in pairs):
        if columns.setdefault(field, column) != column:
            raise PydanticCustomError(
                "map", "{field} is both {first} and {column}: use one; several right answers: {field}={first}+{column}",
                {"field": field, "first": columns[field], "column": column},
            )  # fmt: skip
    return columns


DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|", "space": " "}


def _read_delimiter(value: str) -> str:
    character = DELIMITERS.get(value.lower(), value)
    if value != "auto" and (len(character) != 1 or character in '"\r\n\0'):
        raise PydanticCustomError("delimiter", "expected comma, semicolon, tab, pipe or one character")
    return character


Delimiter = Annotated[str, AfterValidator(_read_delimiter)]


def _read_encoding(value: str) -> str:
    try:
        if value != "auto":
            b" ".decode(value, "ignore")  # decoding b'' would accept any name
            codecs.getincrementaldecoder(value)()
    except (LookupError, ValueError) as error:
        raise PydanticCustomError(
            "encoding", "expected a text encoding of Python, e.g. utf-8, cp1252, utf-16, shift_jis"
        ) from error
    return value


Encoding = Annotated[str, AfterValidator(_read_encoding)]


ColumnMap = Annotated[dict[str, str], BeforeValidator(_read_map)]


class Recipe(Options):
    """All options of a run; saved as ``recipe.yaml`` in the run folder."""

    # Purpose
    recipe: Annotated[str, FlagSpec(metavar="RECIPE")] = "custom"
    """preset for a task; `gptj-ft recipes list` shows them"""
    about: str = ""
    """one line: the purpose of the preset"""
    source: str = ""
    """origin of the hyper-parameters"""

    task: Task = "language-model"
    """prediction target: the next token; one label of a text, several labels, or a number; a label for each word;
    the span of an answer in a text; the sentences of a summary
    """

    # Model and data
    model: Annotated[str | None, FlagSpec(metavar="MODEL")] = None
    """folder or name of a model; default: the downloaded one. 'tiny' makes a small random one, and a config.json one of
    its size
    """
    data: Annotated[str | None, FlagSpec(metavar="FILE")] = None
    """training rows: a file (jsonl, json, csv, tsv, xlsx, docx, parquet, txt), folder, pattern or prepared folder; or a
    dataset on the Hub, hub:owner/name
    """
    val_data: Annotated[str | None, FlagSpec(metavar="FILE")] = None
    """validation rows; empty: a fraction of the data is held out"""
    holdout: Annotated[BelowOne, FlagSpec(set_by_presets=True)] = 0.05
    """fraction of the documents held out for validation, without val_data; of a single document, of its windows"""
    output: Annotated[str | None, FlagSpec(metavar="FOLDER")] = None
    """new run folder; default runs/RECIPE-N"""

    documents: Literal["paragraph", "line", "file"] = "paragraph"
    """rows of plain text: paragraphs (separated by a blank line), lines, or whole files"""
    quotes: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """whether " quotes cells of tables; auto: yes in CSV, in TSV only if the header is quoted"""
    delimiter: Delimiter = "auto"
    """cell separator of tables: comma, semicolon, tab, pipe or one character"""
    encoding: Encoding = "auto"
    """text encoding, e.g. cp1252, utf-16, shift_jis; auto: UTF-8, UTF-16, or Windows-1252 with a note"""
    sheet: str = ""
    """spreadsheet sheet to read; empty: the first visible one"""
    header: Names = ()
    """column names for a table without a header line; empty: the first line is the header"""
    max_record: ByteSize = MOST_RECORD_BYTES
    """longest line, cell or record of a file, e.g. 1GiB; a longer one is an error"""
    max_bad_rows: Annotated[int, FlagSpec(in_more=True, set_by_presets=True)] = Field(0, ge=0)
    """unreadable records allowed before the data is rejected"""
    cache: Annotated[bool, FlagSpec(in_more=True)] = True
    """reuse tokenized rows of an earlier command if nothing changed, and store them for later"""
    map: Annotated[ColumnMap, FlagSpec(metavar="FIELD=COLUMN")] = {}
    """field=column pairs, e.g. document=body,summary=tl_dr; several columns of right answers: summary=s1+s2 or
    summary=s*; other fields are detected
    """

    # From rows to tokens
    prompt: str = ""
    """template of the text before the answer, with {{ fields }} (Jinja), or @FILE; empty: train on every token"""
    completion: str = "{{ text }}"
    """template of the text to train on, with {{ fields }} (Jinja), or @FILE; EOS follows"""
    bos: bool = True
    """begin texts with the BOS token if the tokenizer does, as in transformers (Llama, Mistral, Gemma); a chat template
    writes its own
    """
    chat_template: str = "auto"
    """template that writes messages as text; auto: conversations by the model's own, if it has one; model: every
    prompt is a message and the model's own template writes it; none: only prompt and completion; or @FILE
    """
    template_options: dict[str, bool | int | float | str] = {}
    """variables of the chat template, e.g. enable_thinking: false"""
    template_date: str = ""
    """date that a chat template writes, as 2026-01-31; empty: today, or the date of the prepared rows"""
    pair: str = ""
    """template of the second text of a task on two texts; `prompt` is the first"""
    fields: dict[str, tuple[str, ...]] = {"text": ("text", "content", "body", "article", "document")}
    """column names recognised for each template field, best first"""
    labels: dict[str, str] = {}
    """values of the field {label} and the word to train on, instead of the preset's; other rows are left out. For a
    task with labels: their names in order; empty: as in the rows
    """
    no_answer: str = ""
    """answer for rows without one (SQuAD v2.0); empty: such rows are left out"""
    sentences: tuple[str, ...] = ("highlights",)
    """columns in which a list holds the sentences of one text, not several answers"""
    on_long: Annotated[Literal["shorten", "split", "skip", "error"], FlagSpec(in_more=True, set_by_presets=True)] = (
        "split"
    )
    """rows above max_length: cut the `shorten` field, split plain text, skip the row, or stop"""
    shorten: str = ""
    """the only field that may be cut when a row is too long"""
    cut: Literal["end", "start", "middle", "answer"] = "end"
    """part of that field to cut: its end, start or middle, or the text farthest from the answer"""
    packing: Annotated[Literal["off", "apart", "joined"], BeforeValidator(_switch)] = "off"
    """fill windows of max_length with several documents of plain text; apart: attention stays inside each document;
    joined: it crosses them
    """
    max_length: Annotated[int, FlagSpec(set_by_presets=True)] = Field(2048, ge=2, lt=2**31)
    """maximum tokens of prompt and answer, with BOS and EOS; for rows of token ids, of inputs"""

    stride: int = Field(128, ge=0, lt=2**31)
    """tokens shared by consecutive windows of a long text, for token-labels and spans"""

    # Reading the head's output
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight a row by the rarity of its label"""
    label_threshold: Fraction = 0.5
    """multi-label: minimum probability of a predicted label"""
    max_answer_tokens: int = Field(30, ge=1)
    """spans: maximum answer length in tokens"""
    num_best: int = Field(20, ge=1)
    """spans: start and end candidates, and answers listed"""
    null_threshold: float = 0.0
    """spans: minimum score lead of no answer over the best answer"""
    num_sentences: int = Field(3, ge=1)
    """sentences: number of sentences in a summary"""
    block_trigrams: bool = True
    """sentences: skip one that repeats three consecutive words of the summary so far"""

    # Evaluation
    metrics: tuple[Literal["rouge", "squad", "accuracy", "relations"], ...] = ()
    """metrics of generated answers"""
    stemming: bool = True
    """rouge: English words with the same stem count as equal"""
    generation: Generation = Field(default_factory=Generation)  # type: ignore[arg-type]

    # Training
    method: Literal["full", "lora", "sampled"] = "full"
    """full: train every parameter, or those of `train`; lora: train adapters and keep the model frozen; sampled: train
    embedding, head and a few random blocks, new ones every few steps
    """
    lora: LoRA = Field(default_factory=LoRA)  # type: ignore[arg-type]
    sampled: Sampled = Field(default_factory=Sampled)  # type: ignore[arg-type]
    train: Annotated[Names, FlagSpec(metavar="PATTERN", in_more=True)] = ()
    """parameters to train, as shell patterns of Hugging Face's names (h.2[0-7].*,lm_head.*); empty: all"""
    epochs: Annotated[float, FlagSpec(set_by_presets=True)] = Field(1.0, gt=0.0, le=MOST_EPOCHS)
    """passes over the rows; a fraction of a step rounds up"""
    max_steps: Annotated[int | None, FlagSpec(set_by_presets=True)] = Field(None, ge=1, le=MOST_STEPS)
    """optimizer steps; overrides epochs"""
    batch_size: Annotated[int, FlagSpec(set_by_presets=True)] = Field(16, ge=1, le=MOST_STEPS)
    """rows per optimizer step"""
    micro_batch_tokens: int = Field(2048, ge=1, lt=2**31)
    """tokens computed at once; changes memory and rounding, never the batch"""
    lr: Annotated[float, FlagSpec(set_by_presets=True)] = Field(1e-5, gt=0.0)
    """peak learning rate"""
    schedule: Annotated[
        Annotated[NamedShape, Tag("(shape)")] | Annotated[Pieces, Tag("(pieces)")],
        Discriminator(
            lambda value: {str: "(shape)", list: "(pieces)", tuple: "(pieces)"}.get(type(value)),
            custom_error_type="schedule",
            custom_error_message="expected linear, cosine, constant, inverse_sqrt or a list of pieces",
        ),
    ] = "cosine"
    """linear, cosine, constant or inverse_sqrt after the warm-up; or a list of pieces (shape, start, end, steps),
    which replace warmup and final_lr
    """
    warmup: float = Field(0.1, ge=0.0, le=MOST_STEPS)
    """below 1: fraction of all steps; from 1: number of steps"""
    final_lr: Fraction = 0.1
    """learning rate at the last step, as a fraction of the peak; 0 would be reached a step later, so that each step
    trains
    """
    betas: Annotated[tuple[BelowOne, BelowOne], BeforeValidator(_words)] = (0.9, 0.999)
    """decay rates of Adam's two moments; below 1"""
    eps: float = Field(1e-8, gt=0.0)
    """added to the square root of the second moment (torch's formula)"""
    weight_decay: float = Field(0.1, ge=0.0)
    """decoupled weight decay; not for biases and layer norms"""
    clip_norm: float | None = Field(1.0, gt=0.0)
    """maximum global gradient norm; null: no clipping"""
    z_loss: float = Field(0.0, ge=0.0)
    """weight of the log(Z)^2 term of the loss; GPT-J's pre-training: 1e-4"""
    seed: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0, lt=2**63)
    """seed of the row order, the held-out rows and the tiny model"""
    revision: Annotated[Literal[1, 2], FlagSpec(in_more=True)] = 2
    """revision of the rules that decide numbers: 1 repeats runs of earlier versions, which reach final_lr a step later
    and drop 0.1 before the word labels of decoders, only if anything else is dropped
    """

    dropout: BelowOne | None = None
    """fraction of activations dropped in training; null: as in config.json"""
    attention_dropout: BelowOne | None = None
    """fraction of attention weights dropped in training; null: as in config.json, or 0 if dropout is 0"""
    layer_decay: float = Field(1.0, gt=0.0, le=1.0)
    """ratio of the learning rates of one layer and the layer above"""
    bias_correction: bool = True
    """divide Adam's moments by 1 - beta ** step; false: as BERT was fine-tuned"""

    canaries: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0, le=MOST_CANARIES)
    """random secrets planted in copies of training rows, for `evaluate --leaks`; 0: none"""
    canary_repeats: Repeats = (1,)
    """training rows that contain each canary; several numbers take turns, e.g. 1,4,16"""

    # Hardware
    device: Annotated[str, FlagSpec(in_more=True)] = "auto"
    """auto, cpu, or an accelerator: cuda, cuda:1, xpu, mps"""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], FlagSpec(in_more=True)] = "auto"
    """compute type; master weights are fp32; fp16 uses dynamic loss scaling"""
    products: Annotated[str, AfterValidator(_check_products)] = "auto"
    """
    library of backward's matrix products on a CPU, for gradients of inputs and of weights: onednn, mkl, or two such as
    onednn/mkl; in bf16, "widened onednn" multiplies in fp32; auto: measured for each shape, widened without a bf16 unit
    """
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """
    type of Adam's two moments; bf16 halves their memory and traffic, int8 (8-bit codes of bitsandbytes) quarters them;
    both round stochastically
    """
    initial_moments: Literal["model", "zero"] = "model"
    """start from the moments in the model's folder (convert --with-optimizer), or from zero"""
    master: Literal["split", "fp32"] = "split"
    """
    layout of the fp32 master weights of a bf16 run: split: 16 bits next to each bf16 weight; fp32: 32 bits; both give
    the same numbers
    """
    gradients: Literal["fp32", "bf16"] = "fp32"
    """type of stored gradients; they are summed in fp32"""
    weights: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where the weights live (device: GPU memory, host: RAM)"""
    optimizer_state: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where gradients, moments and master weights live (device: GPU memory, host: RAM)"""
    max_time: Annotated[Duration | None, FlagSpec(metavar="TIME")] = None
    """save and stop when a session has run this long: 8h, 90m, 1h30m; default: no limit"""
    device_memory: Annotated[ByteSize | None, FlagSpec(metavar="SIZE")] = None
    """maximum device memory to use, e.g. 8GiB; default: all free memory"""
    host_memory: Annotated[ByteSize | None, FlagSpec(metavar="SIZE")] = None
    """maximum RAM to use, e.g. 6GiB; default: all free RAM"""
    disk_space: Annotated[ByteSize | None, FlagSpec(metavar="SIZE", in_more=True)] = None
    """maximum disk space to use, e.g. 200GB; default: all free space"""
    activations: Annotated[
        Literal["auto", "keep", "recompute"] | Annotated[int, Field(ge=0)], FlagSpec(in_more=True)
    ] = "auto"
    """blocks that keep their activations for backward: as many as fit, all, none, or a number"""
    boundaries: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where the inputs of recomputed layers wait for backward"""
    read_ahead: int = Field(1, ge=0, le=8)
    """layers read ahead"""
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    """CPU threads per process, which decide the last bits; null: the cores, divided among the processes of a
    machine
    """
    share: Literal["auto", "layers", "rows"] = "auto"
    """work of each process, if there are several: some layers with their state, or some rows of each step and a
    whole model
    """
    replicas: int | None = Field(None, ge=1, le=MOST_RANKS)
    """with share: layers, number of process groups that each have the whole model and share the rows of a step;
    null: 1
    """
    lanes: int | None = Field(None, ge=1, le=MOST_RANKS)
    """partial sums of a step's gradient, a multiple of replicas; decides the last bits; null: one per replica"""

    mirror: bool = False
    """with share: layers on machines with separate disks, write each layer of a checkpoint to two machines, so that
    losing one disk loses nothing
    """

    # Output
    validate_every: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0, le=MOST_STEPS)
    """steps between validations; 0: only before and after training"""
    sample_rows: int = Field(0, ge=0)
    """validation rows answered and scored by `metrics` at each validation; 0: none"""
    best_by: str = "validation_loss"
    """criterion of the best state: validation_loss, or a score of the sample_rows; with a head, of all rows"""
    patience: int | None = Field(None, ge=1)
    """stop after this many validations without a better state; null: never"""
    save_every: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0, le=MOST_STEPS)
    """steps between checkpoints; 0: by time only. A run from disk never loses a step"""
    keep: Annotated[Keep, FlagSpec(in_more=True)] = ("last",)
    """checkpoints to keep: last, best (see best_by), all of save_every, or the newest N of them"""
    export: Annotated[Literal["last", "best"], FlagSpec(in_more=True)] = "last"
    """state to export as the tuned model"""
    save_minutes: float = Field(30.0, gt=0.0)
    """minutes between checkpoints; Ctrl-C saves at once"""
    report_to: Annotated[Literal["none", "tensorboard", "trackio", "wandb"], FlagSpec(in_more=True)] = "none"
    """experiment tracker that also gets metrics.jsonl; wandb sends them to its server"""

    def to_dict(self) -> dict[str, Any]:
        """Return the options that apply to this run, as JSON values."""
        unused = set() if isinstance(self.schedule, str) else set(STRETCHING)
        return self.model_dump(mode="json", exclude=unused)

    def num_steps(self, num_rows: int) -> int:
        """Return the optimizer steps of a run on ``num_rows`` rows, rounded up as by `transformers`' Trainer."""
        return self.max_steps or max(1, math.ceil(self.epochs * -(-num_rows // self.batch_size)))

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the warm-up steps of a named schedule in a run of ``num_steps``."""
        return round(self.warmup if self.warmup >= 1 else self.warmup * num_steps)

    @property
    def shares_layers(self) -> bool:
        """Whether several processes can share the layers: not with a task head, and not if the run samples answers."""
        return self.task == "language-model" and not self.sample_rows

    @property
    def keeps_best(self) -> bool:
        """Whether the best state is kept."""
        return "best" in self.keep or self.export == "best"

    @property
    def num_newest_kept(self) -> int | None:
        """Number of newest ``save_every`` checkpoints to keep; ``None``: all."""
        return None if "all" in self.keep else max((int(word) for word in self.keep if word.isdigit()), default=0)


# Options that may change on resume: they change no number of the run.
FREE_ON_RESUME = frozenset((
    "device", "weights", "optimizer_state", "device_memory", "host_memory", "disk_space", "activations", "boundaries",
    "read_ahead", "threads", "share", "replicas", "mirror", "save_every", "save_minutes", "max_time", "keep", "export",
    "report_to", "output",
))  # fmt: skip
# Options added after resumable runs were started; those runs used `OLD_VALUES`, else the values that are now defaults.
YOUNGER = frozenset((
    "task", "pair", "stride", "class_weights", "label_threshold", "max_answer_tokens", "num_best", "null_threshold",
    "num_sentences", "block_trigrams", "dropout", "attention_dropout", "layer_decay", "bias_correction",
    "header", "lanes", "lora.rslora", "chat_template", "template_options", "template_date", "generation.end_tokens",
    "lora.dora", "revision", "products", "master", "canaries", "canary_repeats", "sampled.layers", "sampled.period",
    "sampled.vocabulary_every", "bos",
))  # fmt: skip
OLD_VALUES: Mapping[str, Any] = {
    "revision": 1,
    "products": "onednn",
    "master": "fp32",
    "bos": False,
}  # of those that were not the defaults of today
GROUPS: Mapping[str, type[Options]] = {
    "generation": Generation, "lora": LoRA, "sampled": Sampled, "schedule": SchedulePiece,
}  # fmt: skip
STRETCHING = ("warmup", "final_lr")  # unused by a schedule of pieces


def field_of(option: str) -> FieldInfo:
    """Return the declaration of an option; one in a group is named ``group.name``."""
    group, _, name = option.rpartition(".")
    return (GROUPS[group] if group else Recipe).model_fields[name]


def flag_spec(option: str) -> FlagSpec:
    """Return the flag metadata of an option."""
    return next((each for each in field_of(option).metadata if isinstance(each, FlagSpec)), FlagSpec())


def meaning_of(option: str) -> str:
    """Return the help text of an option in one line."""
    return " ".join((field_of(option).description or "").split())
