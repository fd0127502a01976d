"""Addresses are integers (``Tensor.data_ptr()``); ``octavo.kernels.fused`` checks what lies behind them."""

SPAN: int

def isa() -> str: ...
def isas() -> list[str]: ...

class Shape:
    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, half: bool
    ) -> None: ...

class ThreadPool:
    """``num_threads`` threads, the caller among them; whoever uses them at the same time waits."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class History:
    def __init__(
        self, *, table: int, max_blocks: int, window: int, summaries: int, max_summaries: int, budget: int
    ) -> None: ...

class PagedBatch:
    def __init__(
        self,
        *,
        block_table: int,
        seq_lens: int,
        cu_seqlens_q: int,
        num_seqs: int,
        max_blocks: int,
        shape: Shape,
        history: History,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...

class CompactLayer:
    def __init__(self, *, planes: list[int], num_blocks: int, value_bits: int) -> None: ...

def value_record_bytes(head_dim: int, value_bits: int) -> int: ...
def seal_compact(
    *,
    key: int,
    value: int,
    num_blocks: int,
    compact: list[int],
    num_compact: int,
    value_bits: int,
    pairs: int,
    count: int,
    shape: Shape,
    pool: ThreadPool,
    isa: str,
) -> None: ...

OPERATION_INTS: int

def summarise_compact(
    *,
    compact: list[int],
    num_compact: int,
    value_bits: int,
    operations: int,
    count: int,
    turns: tuple[int, int],
    shape: Shape,
    pool: ThreadPool,
    isa: str,
) -> None: ...

class Recall:
    def __init__(
        self, *, share: float, table: int, strides: int, max_blocks: int, layer: int, report: int
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        *,
        batch: PagedBatch,
        topk: int,
        shape: Shape,
        share: bool,
        pool: ThreadPool,
        isa: str,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def keys_read(self) -> int: ...
    def run(
        self,
        q: int,
        q_stride: int,
        key: int,
        value: int,
        num_blocks: int,
        scale: float,
        window: int,
        out: int,
        lse: int,
        compact: CompactLayer,
        mass: int,
        recall: Recall | None,
    ) -> None: ...

def weight_formats() -> list[tuple[str, int, int, bool]]: ...

class WeightMemory:
    """Huge pages that the weights of one model share, one after the other; held by each of them."""

    def __init__(self) -> None: ...

class PackedWeight:
    """A weight [outputs, inputs] in its stored bits, in the kernels' order; see ``csrc/linear.h``."""

    def __init__(self, type: str, outputs: int, inputs: int, memory: WeightMemory) -> None: ...
    @property
    def type(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def pack_rows(self, data: int, first: int, rows: int, pool: ThreadPool) -> None: ...
    def pack_expanded(self, stored: str, data: int, pool: ThreadPool) -> None: ...
    def expand_row(self, row: int, out: int) -> None: ...

def linear(
    *,
    weights: list[PackedWeight],
    x: int,
    rows: int,
    x_stride: int,
    bias: int,
    residual: int,
    out: int,
    out_stride: int,
    int8: bool,
    pool: ThreadPool,
    isa: str,
) -> None: ...

class LayerCache:
    """Where one layer's K and V lie, and its constants; see ``csrc/layer.h``. Holds addresses."""

    def __init__(self, *, key: int, value: int, scale: float, window: int, compact: CompactLayer) -> None: ...

def run_layers(
    *,
    layers: list[Layer],
    caches: list[LayerCache],
    ropes: list[int],
    step: Step,
    plan: AttentionPlan,
    attention: int,
    workspace: Workspace,
    pool: ThreadPool,
) -> None: ...

class Workspace:
    """Memory that only grows, for what lives within one call."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class Norm:
    """Addresses: whoever makes it keeps the weights alive."""

    def __init__(self, *, weight: int, bias: int, eps: float, center: bool) -> None: ...

class Step:
    def __init__(
        self,
        *,
        rows: int,
        x: int,
        qkv: int,
        positions: int,
        num_positions: int,
        slots: int,
        num_blocks: int,
        shape: Shape,
    ) -> None: ...

class Layer:
    """Addresses of one layer's weights and what is done with them; see ``csrc/layer.h``."""

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        gated: bool,
        activation: str,
        int8: bool,
        isa: str,
    ) -> None: ...
    def set_norm(self, name: str, norm: Norm) -> None: ...
    def set_projection(self, name: str, weights: list[PackedWeight], bias: int) -> None: ...
    def before_attention(self, step: Step, rope: int, key: int, value: int, pool: ThreadPool) -> None: ...
    def after_attention(
        self, x: int, rows: int, attention: int, workspace: Workspace, pool: ThreadPool
    ) -> None: ...

def embed(
    *,
    tokens: PackedWeight,
    ids: int,
    scale: float,
    places: PackedWeight | None,
    positions: int,
    rows: int,
    x: int,
    workspace: Workspace,
    pool: ThreadPool,
    isa: str,
) -> None: ...
def logits(
    *,
    norm: Norm,
    head: PackedWeight,
    x: int,
    x_stride: int,
    x_rows: int,
    take: int,
    rows: int,
    out: int,
    int8: bool,
    workspace: Workspace,
    pool: ThreadPool,
    isa: str,
) -> None: ...
def activate(*, activation: str, gate: int, up: int, n: int, out: int, isa: str) -> None: ...
def norm(*, norm: Norm, x: int, n: int, out: int, isa: str) -> None: ...
def write_kv(
    *,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    slots: int,
    num_tokens: int,
    key: int,
    value: int,
    num_blocks: int,
    shape: Shape,
    isa: str,
) -> None: ...
def exp(x: int, n: int, out: int, isa: str) -> None: ...
def read_memory(data: int, bytes: int, pool: ThreadPool) -> int: ...

class DrawParams:
    """One row's parameters; ``top_k`` has no effect unless it is above 0."""

    def __init__(
        self, *, temperature: float, top_k: int, top_p: float, min_p: float, key: tuple[int, int]
    ) -> None: ...

def best(*, rows: list[int], width: int, value: int, id: int, pool: ThreadPool) -> None: ...
def draw(
    *, rows: list[int], width: int, params: list[DrawParams], id: int, pool: ThreadPool, isa: str
) -> None: ...
def gumbel(*, key: tuple[int, int], ids: int, n: int, out: int) -> None: ...
def score(
    *,
    rows: list[int],
    width: int,
    targets: int,
    num_best: int,
    max_best: int,
    out: tuple[int, int, int],
    pool: ThreadPool,
    isa: str,
) -> None: ...

_Heads = tuple[int, int, int, int]

class TopkShape:
    def __init__(
        self,
        *,
        batch: int,
        num_heads: int,
        num_kv_heads: int,
        num_queries: int,
        num_keys: int,
        head_dim: int,
        topk: int,
        recent: int,
        causal: bool,
        l2: bool,
        scale: float,
    ) -> None: ...

def topk_forward(
    *,
    shape: TopkShape,
    q: _Heads,
    k: _Heads,
    v: _Heads,
    padding: int,
    out: _Heads,
    lse: int,
    index: int,
    weight: int,
    pool: ThreadPool,
    isa: str,
) -> None: ...
def topk_backward(
    *,
    shape: TopkShape,
    q: _Heads,
    k: _Heads,
    v: _Heads,
    out_grad: _Heads,
    index: int,
    weight: int,
    threshold: float,
    q_grad: _Heads,
    k_grad: _Heads,
    v_grad: _Heads,
    pool: ThreadPool,
    isa: str,
) -> None: ...

class TopkPlan:
    def __init__(
        self, *, batch: PagedBatch, policies: int, shape: Shape, pool: ThreadPool, isa: str
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_topk(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    def run(
        self,
        *,
        q: int,
        q_stride: int,
        key: int,
        value: int,
        num_blocks: int,
        scale: float,
        window: int,
        out: int,
        lse: int,
        planes: tuple[int, ...],
        report: int,
        position: int,
        dropped: int,
        compact: CompactLayer,
    ) -> None: ...

RECORD_KEYS: int
REPORT_COLUMNS: int
POLICY_COLUMNS: int

def record_bytes(head_dim: int) -> int: ...
def bounds_bytes(head_dim: int) -> int: ...
def scan_bounds(
    *,
    q: int,
    num_queries: int,
    key: int,
    half: bool,
    num_records: int,
    head_dim: int,
    scale: float,
    tail: bool,
    out: tuple[int, int, int],
    isa: str,
) -> None: ...
