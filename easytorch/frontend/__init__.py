"""Torch modules on any backend: captured by `torch.export`, lowered operation by operation onto a `Builder`.

    model = easytorch.frontend.compile(module, (input_ids,))          # XLA; or backend="torch", "numpy"
    logits = model(input_ids)

capture.py     a module as an `ExportedProgram`: functional, and only operations without a lowering decomposed
registry.py    `@lowering(torch.ops.aten.add.Tensor)`: what is known, ours and users'
context.py     `Context`, a lowering's first argument: the builder, ATen's type promotion, broadcasting, constants
lower.py       the interpreter that walks a graph (an ExportedProgram's, AOTAutograd's, a branch of `torch.cond`)
program.py     `Program`: a graph on a backend, compiled once for each set of sizes
weights.py     parameters and buffers on the device, kept between calls
module.py      `compile`: a program called as the module is; mutated buffers donated, pytrees in and out
train_step.py  forward, backward and the optimizer as one program, over a mesh of devices too (step_*.py,
               optimizer_rules.py, partition_ops.py)
dynamo.py      `torch.compile(backend="easytorch")`: forward and backward are programs (graph_program.py)
buckets.py     dynamic sizes rounded up to a few buckets, where the user declares padding safe
routing.py     what runs on torch where XLA would be slower
rng.py         random numbers, seeded by torch's generator
terms.py       ops with Python's operators, for the formulas of special functions (special.py)
aten/          the lowerings, one file per family

A custom operation is lowered by registering it under its overload, before `compile`:

    @easytorch.frontend.lowering(torch.ops.mylib.scale.default)
    def scale(ctx, x, factor):
        return ctx.builder.mul(x, ctx.scalar(factor, x.shape.dtype))

A lowering receives the arguments of the call: tensors as `Op`, sizes as plain ints (a graph with symbolic sizes is
lowered once for each set of sizes), anything else as in the graph; dtypes are torch's. Default arguments are
left out, as in the graph. It returns an `Op`, a tuple or list of them where the operation has several outputs, or None.
The builder promotes and broadcasts nothing of itself: `ctx.promote`, `ctx.cast`, `ctx.operands` do as ATen does.
"""

from easytorch.frontend.buckets import Bucketed, bucketed
from easytorch.frontend.capture import capture
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError, UnsupportedOpError
from easytorch.frontend.lower import lower_graph
from easytorch.frontend.module import CompiledModule, compile
from easytorch.frontend.registry import lowering, lowerings
from easytorch.frontend.torch_compile import register
from easytorch.frontend.train_step import TrainStep, train_step

register()

__all__ = [
    "Bucketed",
    "CompiledModule",
    "Context",
    "LoweringError",
    "TrainStep",
    "UnsupportedOpError",
    "bucketed",
    "capture",
    "compile",
    "lower_graph",
    "lowering",
    "lowerings",
    "train_step",
]
