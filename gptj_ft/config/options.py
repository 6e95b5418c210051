"""Declare every option of a run: type, default, unit and meaning. This is the only place an option is declared.

The docstring of an option is its help text: see `meaning_of`.

A preset (``recipes/*.yaml``) holds only what differs from these defaults. Values are taken, in order of precedence,
from flags, the environment (``GPTJ_FT_LR=1e-5``), a ``--config`` file, the preset, and the defaults below.
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
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


def parse_duration(value: object) -> object:
    """Return a duration such as ``1h30m`` in seconds; anything but a text is left to the type's own check.

    Raises:
        PydanticCustomError: not a duration.
    """
    if not isinstance(value, str):
        return value
    text, total = value.strip().lower(), 0.0
    if not re.fullmatch(r"(\d+\.?\d*[dhms])+|\d+\.?\d*", text):
        raise PydanticCustomError("duration", "a duration is seconds, or a text such as 8h, 90m, 1h30m or 2d")
    for number, unit in re.findall(r"([\d.]+)([dhms]?)", text):
        total += float(number) * {"d": 86400, "h": 3600, "m": 60}.get(unit, 1)
    return total


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0.0)]


# A thousand times what GPT-J reads at once; and a whole corpus in one line, as some are published, is not larger.
MOST_RECORD_BYTES = 256 * 2**20
SIZE_UNITS = {"": 1, "B": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}


def parse_size(value: object) -> object:
    """Return a size such as ``8GiB`` in bytes; anything but a text is left to the type's own check.

    Raises:
        PydanticCustomError: not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", value.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in SIZE_UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise PydanticCustomError("size", "a size is bytes, or a number with MB, MiB, GB, GiB, TB or TiB")
    return int(float(match[1]) * units[match[2].lower()])


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


def _words(value: Any) -> Any:
    """Parse ``best,last``, or a bare number, as a list."""
    return str(value).split(",") if isinstance(value, str | int) else value


def _keep_words(value: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in value)
    wrong = [word for word in words if word not in ("last", "best", "all") and not re.fullmatch("[1-9][0-9]*", word)]
    if wrong or not words:
        raise ValueError("use last, best, all or a number, with commas between them")
    return words


Keep = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_keep_words)]


Names = Annotated[tuple[str, ...], BeforeValidator(_words)]


@dataclass(frozen=True)
class FlagSpec:
    """How the command line presents an option: metadata of its field."""

    metavar: str | None = None  # kind of value, as help names it; shell completion goes by it
    in_more: bool = False  # shown by --help-all only
    set_by_presets: bool = False  # help names no default, because presets set the option


class Options(BaseModel):
    """Group of options: frozen; unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Generation(Options):
    """Settings of generation, which `evaluate` and `generate` use unless told otherwise."""

    max_new_tokens: int = Field(128, ge=1)
    """most tokens to write"""
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy; above, sampling"""
    top_p: Annotated[float, FlagSpec(in_more=True)] = Field(1.0, gt=0.0, le=1.0)
    """sample from the smallest set with this probability"""
    top_k: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0)
    """sample from the k most likely tokens; 0 is all"""
    min_p: Fraction = 0.0
    """sample from tokens with this share of the likeliest's probability"""
    num_beams: Annotated[int, FlagSpec(in_more=True)] = Field(1, ge=1)
    """beams of the search; 1: no search"""
    min_new_tokens: int = Field(0, ge=0)
    """fewest tokens to write"""
    length_penalty: float = 1.0
    """beams are ranked by log-probability / length ** this"""
    early_stopping: bool | Literal["never"] = False
    """end when there are as many finished answers as beams; false: when none is likely to be better; never: when none
    can be
    """
    repetition_penalty: float = Field(1.0, gt=0.0)
    """above 1, tokens that are there already get less likely"""
    no_repeat_ngram_size: int = Field(0, ge=0)
    """so many tokens in a row come once only; 0: no limit"""
    prompt_lookup_num_tokens: int = Field(0, ge=0)
    """guess so many tokens from what is there already and check them in one pass; 0: off"""
    stop: tuple[str, ...] = ()
    """strings at which writing ends; they are not part of the answer"""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """give only so many tokens of a longer prompt, its end cut off, whatever that is; null: the recipe's `on_long` and
    `cut` decide
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Generation:
        if self.min_new_tokens > self.max_new_tokens:
            raise PydanticCustomError("tokens", "min_new_tokens must be at most max_new_tokens")
        if self.prompt_lookup_num_tokens and self.num_beams > 1:
            raise PydanticCustomError("lookup", "prompt_lookup_num_tokens does not go together with num_beams")
        return self

    def search_options(self) -> dict[str, Any]:
        """Return the settings under the names of `transformers`."""
        options = self.model_dump(exclude={"temperature", "top_p", "top_k", "min_p", "stop", "max_prompt_tokens"})
        if not self.prompt_lookup_num_tokens:
            del options["prompt_lookup_num_tokens"]
        if self.num_beams == 1:  # they would be warned of
            del options["length_penalty"], options["early_stopping"]
        options["do_sample"] = self.temperature > 0
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            options |= {"min_p": self.min_p} if self.min_p else {}
        return options | ({"stop_strings": list(self.stop)} if self.stop else {})


class LoRA(Options):
    """Adapters of ``method: lora``; defaults are PEFT's (https://arxiv.org/abs/2106.09685: alpha is the rank)."""

    rank: int = Field(8, ge=1)
    """width between the two matrices of an adapter"""
    alpha: float = Field(8.0, gt=0.0)
    """an adapter's output is multiplied by alpha / rank"""
    dropout: Decay = 0.0
    """share of an adapter's inputs that is dropped in training"""
    targets: Names = ()
    """linear layers that get adapters: shell patterns, such as q_proj,h.2[0-7].mlp.*; none: attention's queries and
    values
    """
    merge: bool = False
    """write the model with the adapter merged in, too"""


class SchedulePiece(Options):
    """Piece of an explicit schedule; rates are shares of ``lr``, as ``final_lr`` is."""

    shape: Shape
    """how the rate gets from start to end"""
    start: Fraction | None = None
    """share at its first step; none: the end before it, or 0"""
    end: Fraction
    """share at the step after its last; for good, if no piece follows"""
    steps: int = Field(ge=1)
    """optimizer steps"""

    @model_validator(mode="after")
    def _has_one_rate_if_constant(self) -> SchedulePiece:
        if self.shape == "constant" and self.start not in (None, self.end):
            raise PydanticCustomError("constant", "a constant piece has one rate, its `end`")
        return self


def _reaches_the_peak(pieces: tuple[SchedulePiece, ...]) -> tuple[SchedulePiece, ...]:
    if all(1.0 not in (piece.start, piece.end) for piece in pieces):
        raise PydanticCustomError("pieces", "start and end are shares of lr, so one of them must be 1")
    return pieces


Pieces = Annotated[tuple[SchedulePiece, ...], AfterValidator(_reaches_the_peak)]


def _read_map(value: Any) -> Any:
    """Read ``document=body,summary=tl_dr``."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(field.strip() and equals and column.strip() for field, equals, column in pairs):
        raise PydanticCustomError("map", "field=column pairs are needed, e.g. document=body,summary=tl_dr")
    columns: dict[str, str] = {}
    for field, column in ((field.strip(), column.strip()) for field, _, column in pairs):
        if columns.setdefault(field, column) != column:
            raise PydanticCustomError(
                "map", "{field} is {first} and {column}: name one; several right answers are {field}={first}+{column}",
                {"field": field, "first": columns[field], "column": column},
            )  # fmt: skip
    return columns


DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|", "space": " "}


def _read_delimiter(value: str) -> str:
    character = DELIMITERS.get(value.lower(), value)
    if value != "auto" and (len(character) != 1 or character in '"\r\n\0'):
        raise PydanticCustomError("delimiter", "comma, semicolon, tab, pipe or a single character is needed")
    return character


Delimiter = Annotated[str, AfterValidator(_read_delimiter)]


def _read_encoding(value: str) -> str:
    try:
        if value != "auto":
            b" ".decode(value, "ignore")  # nothing at all would be taken without a look at the name
            codecs.getincrementaldecoder(value)()
    except (LookupError, ValueError) as error:
        raise PydanticCustomError(
            "encoding", "a text encoding that Python knows is needed, e.g. utf-8, cp1252, utf-16, shift_jis"
        ) from error
    return value


Encoding = Annotated[str, AfterValidator(_read_encoding)]


ColumnMap = Annotated[dict[str, str], BeforeValidator(_read_map)]


class Recipe(Options):
    """All options of a run; saved as ``recipe.yaml`` in the run folder."""

    # What for
    recipe: Annotated[str, FlagSpec(metavar="RECIPE")] = "custom"
    """preset for a task; `gptj-ft recipes list` shows them"""
    about: str = ""
    """one line: what the preset is for"""
    source: str = ""
    """where its hyper-parameters come from"""

    task: Task = "language-model"
    """what is predicted: the next token; a label of a text, or several, or a number; a label of each word; the span of
    an answer in a text; the sentences of a summary
    """

    # What on
    model: Annotated[str | None, FlagSpec(metavar="MODEL")] = None
    """folder or name of a model; default: the downloaded one. 'tiny' makes a small random one"""
    data: Annotated[str | None, FlagSpec(metavar="FILE")] = None
    """training rows: file (jsonl, json, csv, tsv, xlsx, parquet, txt), folder or pattern; or prepared; or a data set on
    the Hub, hub:owner/name
    """
    val_data: Annotated[str | None, FlagSpec(metavar="FILE")] = None
    """validation rows; none: a share of the data is held out"""
    holdout: Annotated[Fraction, FlagSpec(set_by_presets=True)] = 0.05
    """share of the rows held out when no validation rows are given"""
    output: Annotated[str | None, FlagSpec(metavar="FOLDER")] = None
    """run folder to make; default runs/RECIPE-N"""

    documents: Literal["paragraph", "line", "file"] = "paragraph"
    """what a row of plain text is: up to a blank line, a line, or the file"""
    quotes: Literal["auto", "on", "off"] = "auto"
    """whether " encloses cells of tables; auto: in CSV; in TSV where it encloses the names"""
    delimiter: Delimiter = "auto"
    """what separates the cells of a table: comma, semicolon, tab, pipe or a character"""
    encoding: Encoding = "auto"
    """of texts, e.g. cp1252, utf-16, shift_jis; auto: UTF-8, UTF-16, or Windows-1252, which is said"""
    sheet: str = ""
    """sheet of a spreadsheet that is read; empty: the first"""
    header: Names = ()
    """names of the columns of a table whose first line is a row already; none: the first line has them"""
    max_record: ByteSize = MOST_RECORD_BYTES
    """longest line, cell or record of a file, e.g. 1GiB; what is longer is taken for damage"""
    max_bad_rows: Annotated[int, FlagSpec(in_more=True, set_by_presets=True)] = Field(0, ge=0)
    """records that may be unreadable before the data is refused"""
    cache: Annotated[bool, FlagSpec(in_more=True)] = True
    """keep rows as tokens, and take those that are kept, if nothing has changed"""
    map: Annotated[ColumnMap, FlagSpec(metavar="FIELD=COLUMN")] = {}
    """columns by field, e.g. document=body,summary=tl_dr; where several hold right answers, summary=s1+s2 or
    summary=s*; others are recognised
    """

    # How a row becomes tokens
    prompt: str = ""
    """text before the answer, with {{ fields }} (Jinja), or @FILE; empty: train on every token"""
    completion: str = "{{ text }}"
    """the text that is trained on, with {{ fields }} (Jinja), or @FILE; EOS follows"""
    pair: str = ""
    """second text, with {{ fields }}, of a task about two; the prompt is the first"""
    fields: dict[str, tuple[str, ...]] = {"text": ("text", "content", "body", "article", "document")}
    """for each field of the templates, the column names recognised, best first"""
    labels: dict[str, str] = {}
    """what the field {label} may say, and the word to train on; rows with another label are left out. Of a task with
    labels: their names in order; none: as found in the rows
    """
    no_answer: str = ""
    """what to answer where the data has no answer (SQuAD v2.0); empty: such rows are left out"""
    sentences: tuple[str, ...] = ("highlights",)
    """columns in which a list is the sentences of one text, not several answers"""
    on_long: Annotated[Literal["shorten", "split", "skip", "error"], FlagSpec(in_more=True, set_by_presets=True)] = (
        "split"
    )
    """rows above max_length: cut the `shorten` field, split plain text, skip, or stop"""
    shorten: str = ""
    """the one field that may be cut when a row is too long"""
    cut: Literal["end", "start", "middle", "answer"] = "end"
    """what is cut of it: its end, its start, its middle, or what is far from the answer in it"""
    packing: Literal["off", "apart", "joined"] = "off"
    """plain text in windows of max_length, filled with several documents: apart, attention stays inside each; joined,
    it goes across them
    """
    max_length: Annotated[int, FlagSpec(set_by_presets=True)] = Field(2048, ge=2)
    """tokens of prompt, answer and EOS together; of rows that come as tokens, inputs"""

    stride: int = Field(128, ge=0)
    """tokens that the windows of a long text share, of a task about its parts"""

    # How the head's output is read
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: a row counts by how rare its label is"""
    label_threshold: Fraction = 0.5
    """multi-label: probability from which a label is given"""
    max_answer_tokens: int = Field(30, ge=1)
    """spans: longest answer"""
    num_best: int = Field(20, ge=1)
    """spans: starts and ends looked at, and answers listed"""
    null_threshold: float = 0.0
    """spans: how much better than any answer no answer has to score"""
    num_sentences: int = Field(3, ge=1)
    """sentences: how many make a summary"""
    block_trigrams: bool = True
    """sentences: leave out one that shares three words in a row with the summary so far"""

    # How it is judged
    metrics: tuple[Literal["rouge", "squad", "accuracy", "relations"], ...] = ()
    """scores of answers"""
    stemming: bool = True
    """rouge: words of English that have the same stem are the same"""
    generation: Generation = Field(default_factory=Generation)  # type: ignore[arg-type]

    # How it learns
    method: Literal["full", "lora"] = "full"
    """full: every parameter is trained, or those of `train`; lora: adapters beside the model"""
    lora: LoRA = Field(default_factory=LoRA)  # type: ignore[arg-type]
    train: Annotated[Names, FlagSpec(metavar="PATTERN", in_more=True)] = ()
    """what is trained: shell patterns of Hugging Face's names, such as h.2[0-7].*,lm_head.*; none: all"""
    epochs: Annotated[float, FlagSpec(set_by_presets=True)] = Field(1.0, gt=0.0)
    """passes over the rows; a share of a step is a step"""
    max_steps: Annotated[int | None, FlagSpec(set_by_presets=True)] = Field(None, ge=1)
    """optimizer steps; overrides epochs"""
    batch_size: Annotated[int, FlagSpec(set_by_presets=True)] = Field(16, ge=1)
    """rows per optimizer step"""
    micro_batch_tokens: int = Field(2048, ge=1)
    """tokens computed at once; changes memory and rounding, never the batch"""
    lr: Annotated[float, FlagSpec(set_by_presets=True)] = Field(1e-5, gt=0.0)
    """peak learning rate"""
    schedule: Annotated[
        Annotated[NamedShape, Tag("(shape)")] | Annotated[Pieces, Tag("(pieces)")],
        Discriminator(
            lambda value: {str: "(shape)", list: "(pieces)", tuple: "(pieces)"}.get(type(value)),
            custom_error_type="schedule",
            custom_error_message="linear, cosine, constant, inverse_sqrt or a list of pieces is needed",
        ),
    ] = "cosine"
    """linear, cosine, constant or inverse_sqrt after the warm-up; or a list of pieces (shape, start, end, steps), in
    place of warmup and final_lr
    """
    warmup: float = Field(0.1, ge=0.0)
    """below 1: share of all steps; 1 and above: steps"""
    final_lr: Fraction = 0.1
    """learning rate at the last step, as a share of the peak"""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """decay of Adam's two moments; below 1"""
    eps: float = Field(1e-8, gt=0.0)
    """added to the root of the second moment (torch's formula)"""
    weight_decay: float = Field(0.1, ge=0.0)
    """decoupled; biases and layer norms are left out"""
    clip_norm: float | None = Field(1.0, gt=0.0)
    """global gradient norm; null: no clipping"""
    z_loss: float = Field(0.0, ge=0.0)
    """weight of log(Z)^2 beside the loss; GPT-J's pre-training: 1e-4"""
    seed: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0, lt=2**63)
    """order of the rows, the held-out share, the tiny model"""

    dropout: Decay | None = None
    """share of a model's activations that is dropped in training; null: as its config.json says"""
    attention_dropout: Decay | None = None
    """the same of attention's weights; null: as config.json says, or dropout if that is 0"""
    layer_decay: float = Field(1.0, gt=0.0, le=1.0)
    """the learning rate of each layer is that of the layer above, times this"""
    bias_correction: bool = True
    """whether Adam divides its moments by 1 - beta ** step; false: as BERT was tuned"""

    # Where it runs
    device: Annotated[str, FlagSpec(in_more=True)] = "auto"
    """auto, cpu, or an accelerator: cuda, cuda:1, xpu, mps"""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], FlagSpec(in_more=True)] = "auto"
    """type of the computation; master weights fp32; fp16 with dynamic loss scaling"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """type of Adam's two moments; bf16, rounded stochastically, halves their memory and traffic"""
    initial_moments: Literal["model", "zero"] = "model"
    """what moments begin as: those in the model's folder (convert --with-optimizer), or zeros"""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """type in which gradients wait for their update; they are summed in fp32"""
    weights: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where the weights live (device: GPU memory, host: RAM)"""
    optimizer_state: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where gradients, moments and master weights live (device: GPU memory, host: RAM)"""
    max_time: Annotated[Duration | None, FlagSpec(metavar="TIME")] = None
    """stop in time, saved, when a session has run as long as this: 8h, 90m, 1h30m; default: no limit"""
    device_memory: Annotated[ByteSize | None, FlagSpec(metavar="SIZE")] = None
    """most device memory to use, e.g. 8GiB; default: what is free"""
    host_memory: Annotated[ByteSize | None, FlagSpec(metavar="SIZE")] = None
    """most RAM to use, e.g. 6GiB; default: what is free"""
    disk_space: Annotated[ByteSize | None, FlagSpec(metavar="SIZE", in_more=True)] = None
    """most disk space to use, e.g. 200GB; default: what is free"""
    activations: Annotated[
        Literal["auto", "keep", "recompute"] | Annotated[int, Field(ge=0)], FlagSpec(in_more=True)
    ] = "auto"
    """blocks whose activations are kept for backward: what fits, all, none, or so many"""
    boundaries: Annotated[_Place, FlagSpec(in_more=True)] = "auto"
    """where the inputs of recomputed layers wait for backward"""
    read_ahead: int = Field(1, ge=0, le=8)
    """layers read before they are needed"""
    threads: int | None = Field(None, ge=1)
    """CPU threads that a process computes with, which decide last bits; null: the cores, shared between the processes
    of a machine"""
    share: Literal["auto", "layers", "rows"] = "auto"
    """of several processes, what each has: some layers with their state, or some rows of each step and a whole model"""
    replicas: int | None = Field(None, ge=1)
    """with share: layers, groups of as many processes that share the rows of a step; each has the model; null: 1"""
    lanes: int | None = Field(None, ge=1)
    """sums that a step's gradient is made of, one for each replica or several; the last bits depend on it; null: one
    for each"""

    mirror: bool = False
    """with share: layers on machines with disks of their own, each layer of a checkpoint is on two of them, so that one
    disk may be lost
    """

    # What it leaves behind
    validate_every: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0)
    """steps between validations; 0: before and after only"""
    sample_rows: int = Field(0, ge=0)
    """validation rows that are answered, and scored by `metrics`, at each validation; 0: none"""
    best_by: str = "validation_loss"
    """what the best state is best by: validation_loss, or a score of the sample_rows"""
    patience: int | None = Field(None, ge=1)
    """end after so many validations in a row without a better state; null: never"""
    save_every: Annotated[int, FlagSpec(in_more=True)] = Field(0, ge=0)
    """steps between checkpoints; 0: by time only. A run on disk loses no step anyway"""
    keep: Annotated[Keep, FlagSpec(in_more=True)] = ("last",)
    """checkpoints kept: last, best (see best_by), all of save_every, or the newest N of them"""
    export: Annotated[Literal["last", "best"], FlagSpec(in_more=True)] = "last"
    """whose state the tuned model has"""
    save_minutes: float = Field(30.0, gt=0.0)
    """minutes after which a checkpoint is due; Ctrl-C saves at once"""
    report_to: Annotated[Literal["none", "tensorboard", "trackio", "wandb"], FlagSpec(in_more=True)] = "none"
    """tracker that gets the figures of metrics.jsonl, too; wandb's are sent to its server"""

    def to_dict(self) -> dict[str, Any]:
        """Return every option that has a meaning for this run, as JSON has it."""
        unused = set() if isinstance(self.schedule, str) else set(STRETCHING)
        return self.model_dump(mode="json", exclude=unused)

    def num_steps(self, num_rows: int) -> int:
        """Return the optimizer steps of a run on so many rows; the last step of an epoch may take fewer than others.

        A share of a step counts as one, as in the Trainer of `transformers`.
        """
        return self.max_steps or max(1, math.ceil(self.epochs * -(-num_rows // self.batch_size)))

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the steps of a run of so many in which a named schedule rises to its peak."""
        return round(self.warmup if self.warmup >= 1 else self.warmup * num_steps)

    @property
    def shares_layers(self) -> bool:
        """Whether several processes can share the layers: not yet those of a head, or of a model that also answers."""
        return self.task == "language-model" and not self.sample_rows

    @property
    def keeps_best(self) -> bool:
        """Whether the state with the lowest validation loss is kept."""
        return "best" in self.keep or self.export == "best"

    @property
    def num_newest_kept(self) -> int | None:
        """How many of the checkpoints of ``save_every`` are kept; ``None``: all."""
        return None if "all" in self.keep else max((int(word) for word in self.keep if word.isdigit()), default=0)


# Options of the environment, which may change on resume without changing a number of the run.
FREE_ON_RESUME = frozenset((
    "device", "weights", "optimizer_state", "device_memory", "host_memory", "disk_space", "activations", "boundaries",
    "read_ahead", "threads", "share", "replicas", "mirror", "save_every", "save_minutes", "max_time", "keep", "export",
    "report_to", "output",
))  # fmt: skip
# Options younger than runs that can still be resumed: those had what is the default.
YOUNGER = frozenset((
    "task", "pair", "stride", "class_weights", "label_threshold", "max_answer_tokens", "num_best", "null_threshold",
    "num_sentences", "block_trigrams", "dropout", "attention_dropout", "layer_decay", "bias_correction",
    "header", "lanes",
))  # fmt: skip
GROUPS: Mapping[str, type[Options]] = {"generation": Generation, "lora": LoRA, "schedule": SchedulePiece}
STRETCHING = ("warmup", "final_lr")  # what a schedule of pieces has no use for


def field_of(option: str) -> FieldInfo:
    """Return the declaration of an option, ``group.name`` if it is of a group."""
    group, _, name = option.rpartition(".")
    return (GROUPS[group] if group else Recipe).model_fields[name]


def flag_spec(option: str) -> FlagSpec:
    """Return how the command line presents an option."""
    return next((each for each in field_of(option).metadata if isinstance(each, FlagSpec)), FlagSpec())


def meaning_of(option: str) -> str:
    """Return the meaning of an option, which its docstring says, in one line."""
    return " ".join((field_of(option).description or "").split())
