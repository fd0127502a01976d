"""The decoder whose every number comes from native kernels: a row's logits are the same to the bit
alone, in a batch, in any chunk and on any number of threads. torch only holds its memory."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig
from octavo.kernels import layer as kernel
from octavo.kernels.api import AttentionSpec, KVLayer
from octavo.kernels.layer import LayerShape, NativeLayer, NormWeights
from octavo.kernels.linear import PackedLinear, StoredMatrix, WeightMemory
from octavo.kernels.native import ThreadPool, _native
from octavo.models import parts
from octavo.models.rope import RopeTable


class NativeDecoder:
    """The same face as ``Decoder``, on the CPU and with ``fused`` attention. Matrices keep their stored bits.

    One step at a time: its buffers are reused. ``isa`` forces the kernels (tests). ``int8``: what is
    multiplied with weights is rounded to 8 bits a value, as for ``PackedLinear``.
    """

    def __init__(
        self, config: ModelConfig, pool: ThreadPool, *, isa: str = "auto", int8: bool = False
    ) -> None:
        self.config = config
        self.pool = pool
        self._isa = isa
        self._memory = WeightMemory()
        self._workspace = kernel.Workspace()
        self._shape = LayerShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            gated=config.gated_mlp,
            activation=config.activation,
            int8=int8,
        )
        hidden, vocab = config.hidden_size, config.vocab_size
        learned, rotary = config.positions == "learned", config.positions == "rope"
        self._matrices: dict[str, tuple[PackedLinear, str]] = {}
        self._vectors: dict[str, tuple[torch.Tensor, float]] = {}
        self._embedding = self._table(parts.EMBEDDING, vocab)
        self._places = self._table(parts.PLACES, config.max_position_embeddings) if learned else None
        self._head = self._embedding if config.tie_word_embeddings else self._table(parts.HEAD, vocab)
        self._norm = self._norm_weights(parts.FINAL_NORM, hidden)
        has_factors = rotary and config.rope.scaling == "factors"
        factors = self._vector(parts.ROPE_FACTORS, config.head_dim // 2) if has_factors else None
        ropes = [config.layer_rope(i) if rotary else None for i in range(config.num_layers)]
        tables = {
            rope: RopeTable(rope, config.head_dim, "cpu", factors) for rope in ropes if rope is not None
        }
        self._tables = [None if rope is None else tables[rope] for rope in ropes]
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._native: list[NativeLayer] = []
        #: Gone with the engine whose cache it is.
        self._caches: WeakKeyDictionary[KVCache, kernel.LayerCaches] = WeakKeyDictionary()

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Compute one step: K and V of its tokens go to the cache, the result is ``[num_tokens, hidden]``.

        Hidden states are those before the final norm; rows that ``batch.rows_read`` leaves out stay as they
        are before the last layer's attention, as nothing else needs them. Raises ValueError, before anything
        is written, for a token, position or slot that there is not.
        """
        self._ready()
        plan = attention.plan(batch)
        longest = int(batch.positions.max())
        ropes = self._rope_addresses(longest)
        caches = self._caches_of(kv_cache, attention.spec)
        step = kernel.Step(self._shape, batch.positions, batch.slot_mapping, caches.layers[0], longest + 1)
        scale = self.config.embedding_scale
        workspace, pool = self._workspace, self.pool
        kernel.embed(self._embedding, batch.token_ids, scale, self._places, step, workspace, pool, self._isa)
        whole = len(self._native) - (batch.rows_read is not None)
        one_pass = attention.one_pass(plan)
        if one_pass is not None:
            kernel.run_layers(self._native[:whole], caches, ropes, step, one_pass.native, workspace, pool)
        else:
            for i in range(whole):
                kv = self._before_attention(i, step, ropes, caches, batch.turns_keys)
                out = attention.run(step.q, kv, plan)
                self._native[i].after_attention(step.x.data_ptr(), step.rows, out.data_ptr(), workspace, pool)
        if batch.rows_read is not None:
            kv = self._before_attention(whole, step, ropes, caches, batch.turns_keys)
            self._finish_rows_read(batch, attention, step, kv)
        return step.x

    __call__ = forward

    def _before_attention(
        self, index: int, step: kernel.Step, ropes: list[int], caches: kernel.LayerCaches, turns_keys: bool
    ) -> KVLayer:
        kv, table = caches.layers[index], self._tables[index]
        if turns_keys and table is not None:
            kv = kv._replace(turns=table.turns())
        key, value = kv.key.data_ptr(), kv.value.data_ptr()
        self._native[index].before_attention(step.native, ropes[index], key, value, self.pool)
        return kv

    def _rope_addresses(self, longest: int) -> list[int]:
        """Each layer's table, grown to the position ``longest``; 0 for none."""
        addresses = {table: table.upto(longest).data_ptr() for table in {*self._tables} if table is not None}
        return [0 if table is None else addresses[table] for table in self._tables]

    def _caches_of(self, kv_cache: KVCache, spec: AttentionSpec) -> kernel.LayerCaches:
        """The layers' parts of ``kv_cache``, made in its first step."""
        known = self._caches.get(kv_cache)
        if known is None or known.spec is not spec:
            layers = [
                KVLayer(
                    *kv_cache.layer(i),
                    self.config.softmax_scale,
                    self.config.window(i),
                    kv_cache.layer_planes(i),
                    kv_cache.layer_compact(i),
                    layer=i,
                )
                for i in range(self.config.num_layers)
            ]
            known = self._caches[kv_cache] = kernel.LayerCaches(layers, spec)
        return known

    def _finish_rows_read(
        self, batch: ForwardBatch, attention: AttentionBackend, step: kernel.Step, kv: KVLayer
    ) -> None:
        """The last layer after its K and V are written: of the step's rows only those that are read."""
        rows = batch.read_rows()
        if not len(rows):
            attention.compact(kv, batch.compactions, batch.summaries)
            return
        x = step.x.numpy()  # numpy's indexing starts no threads, which would wait on the pool's cores
        part = torch.from_numpy(x[rows])
        out = attention.run(torch.from_numpy(step.q.numpy()[rows]), kv, attention.plan_read(batch))
        self._native[-1].after_attention(
            part.data_ptr(), len(rows), out.data_ptr(), self._workspace, self.pool
        )
        x[rows] = part.numpy()

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary, ``[m, vocab]`` float32, for ``rows`` ``[m]`` of ``forward``."""
        self._ready()
        int8 = self._shape.int8
        return kernel.logits(
            self._norm, self._head, hidden, rows, self._workspace, self.pool, self._isa, int8
        )

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a checkpoint must bring, each exactly once."""
        matrices = {
            name: (linear.parts[part], linear.inputs) for name, (linear, part) in self._matrices.items()
        }
        return matrices | {name: tuple(vector.shape) for name, (vector, _) in self._vectors.items()}

    def step_matrices(self) -> list[_native.PackedWeight]:
        """What every step reads whole: the layers' matrices and the head, but not tables read row by row."""
        return [weight for product in self.products() for weight in product]

    def products(self) -> list[list[_native.PackedWeight]]:
        """The matrices of every product of a step: those of Q, K and V are one."""
        return [linear.weights for linear in self.linears()]

    def linears(self) -> list[PackedLinear]:
        """The products themselves, in the order of a step, without norms and activations (benches)."""
        self._ready()
        layers = [linear for projections, _ in self._layers for linear, _ in projections.values()]
        return [*layers, self._head]

    def load_weight(self, name: str, weight: torch.Tensor | StoredMatrix) -> None:
        """Take a matrix, as it is stored or as a tensor of any float type, or a vector, as a tensor.

        Raises ValueError for a name that this model does not have, a wrong shape, or a second matrix.
        """
        if name in self._matrices:
            linear, part = self._matrices[name]
            _check_shape(name, (linear.parts[part], linear.inputs), _shape_of(weight))
            linear.pack(part, weight if isinstance(weight, StoredMatrix) else StoredMatrix.of(weight))
        elif name in self._vectors:
            vector, offset = self._vectors[name]
            _check_shape(name, tuple(vector.shape), _shape_of(weight))
            assert isinstance(weight, torch.Tensor)
            vector.copy_(weight).add_(offset)
        else:
            raise ValueError(f"this {self.config.architecture} model has no weight called {name!r}")

    def _ready(self) -> None:
        """Native layers hold addresses of packed weights, so they are made when all are there."""
        if not self._native:
            self._native = [
                NativeLayer(self._shape, projections, norms, self._isa) for projections, norms in self._layers
            ]

    def _layer(
        self, index: int
    ) -> tuple[dict[str, tuple[PackedLinear, torch.Tensor | None]], dict[str, NormWeights]]:
        prefix = f"model.layers.{index}."
        projections = {}
        for role, part in parts.projections(self.config).items():
            linear = self._linear(part.inputs, part.outputs)
            bias = torch.empty(linear.outputs) if part.bias else None
            first = 0
            for name, rows in part.outputs.items():
                self._matrices[f"{prefix}{name}.weight"] = (linear, name)
                if bias is not None:
                    self._vectors[f"{prefix}{name}.bias"] = (bias[first : first + rows], 0.0)
                first += rows
            projections[role] = (linear, bias)
        norms = {
            role: self._norm_weights(prefix + name, self.config.hidden_size)
            for role, name in parts.norms(self.config).items()
        }
        offset, eps = self.config.norm_weight_offset, self.config.norm_eps
        for role, name in parts.head_norms(self.config).items():
            weight = self._vector(f"{prefix}{name}.weight", self.config.head_dim, offset)
            norms[role] = NormWeights(weight, None, eps, center=False)
        return projections, norms

    def _linear(self, inputs: int, outputs: dict[str, int]) -> PackedLinear:
        return PackedLinear(inputs, outputs, self.pool, self._isa, int8=self._shape.int8, memory=self._memory)

    def _table(self, name: str, rows: int) -> PackedLinear:
        table = self._linear(self.config.hidden_size, {name: rows})
        self._matrices[name] = (table, name)
        return table

    def _vector(self, name: str, size: int, offset: float = 0.0) -> torch.Tensor:
        vector = torch.empty(size)
        self._vectors[name] = (vector, offset)
        return vector

    def _norm_weights(self, name: str, size: int) -> NormWeights:
        center = self.config.norm == "layer"
        weight = self._vector(f"{name}.weight", size, self.config.norm_weight_offset)
        bias = self._vector(f"{name}.bias", size) if center else None
        return NormWeights(weight, bias, self.config.norm_eps, center)


def _shape_of(weight: torch.Tensor | StoredMatrix) -> tuple[int, ...]:
    return (weight.outputs, weight.inputs) if isinstance(weight, StoredMatrix) else tuple(weight.shape)


def _check_shape(name: str, wanted: tuple[int, ...], got: tuple[int, ...]) -> None:
    if got != wanted:
        raise ValueError(f"{name} must have shape {wanted}, the checkpoint has {got}")
