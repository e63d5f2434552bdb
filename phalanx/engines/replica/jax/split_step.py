"""Steps on JAX that need the other ranks in the middle.

A host callback inside a compiled function can deadlock in a process with one core, and XLA may order several of them
differently on each rank. So a host call is a primitive that XLA never sees. The step is traced once, as one function,
and cut at its host calls. Each piece is compiled, and the calls are made between the pieces, in the order of the trace,
which is the same on all ranks:

    piece 0 -> host calls that depend on no other -> piece 1 -> those that depend on these -> ... -> the results

A piece computes only what the next calls need, so that most of a step stays in one piece, which XLA can fuse. Outside
of compiled functions, a host call is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from phalanx.engines.tensors import Gradient, HostFunction
from phalanx.errors import UnsupportedError

Array = np.ndarray[Any, Any]
Jit = Callable[..., Callable[..., Any]]
Results = tuple[jax.ShapeDtypeStruct, ...]

INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call"}
)
"""Calls in a trace that may be replaced by what they call."""


class CompiledHostCallError(UnsupportedError):
    """JAX was asked to compile a function that needs the other ranks in the middle."""


_host_call = jex.Primitive("phalanx_host_call")
_host_call.multiple_results = True


@_host_call.def_impl  # type: ignore[untyped-decorator]
def _call_now(*values: Any, function: HostFunction, results: Results) -> list[Any]:
    return [jnp.array(array) for array in function([np.asarray(value) for value in values])]


@_host_call.def_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(*values: Any, function: HostFunction, results: Results) -> list[Any]:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


def _refuse(*_: Any, **__: Any) -> Any:
    raise CompiledHostCallError(
        "A value was merged over the replicas inside a function compiled by JAX. A compiled function cannot wait for "
        "other processes: compute the gradients in one jitted function, merge them with `strategy.reduce` or "
        "`get_replica_context().all_reduce` outside, and apply them in a second (examples/custom_loop_jax.py)."
    )


mlir.register_lowering(_host_call, _refuse)


def host_call(
    function: HostFunction, tensors: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct], gradient: Gradient | None
) -> list[Any]:
    """Call a function of the tensors' values on the host.

    Args:
        function: A linear function, whose `gradient` is linear too: the gradient of that is `function` again.
        tensors: The inputs. Floating if there is a gradient.
        results: Shapes and dtypes of the results. If nothing is traced, the shapes may differ.
        gradient: See `phalanx.engines.tensors.Gradient`.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    like = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def forward_call(*values: Any) -> list[Any]:
        bound: list[Any] = _host_call.bind(*values, function=function, results=tuple(results))
        return bound

    def forward(*values: Any) -> tuple[list[Any], None]:
        return forward_call(*values), None

    def backward(_: None, flowing: list[Any]) -> tuple[Any, ...]:
        assert gradient is not None
        back = host_call(
            lambda arrays: gradient(arrays, shapes), flowing, like, lambda arrays, shapes_of_results: function(arrays)
        )
        return tuple(back)

    forward_call.defvjp(forward, backward)
    if gradient is None:
        tensors = [jax.lax.stop_gradient(tensor) for tensor in tensors]
    found: list[Any] = forward_call(*tensors)
    return found


class _Equation(NamedTuple):
    """One operation of a flat trace, and the trace it comes from. Inputs are numbers of values, or constants."""

    equation: Any
    trace: Any
    inputs: list[Any]
    outputs: list[int]


class _Constant(NamedTuple):
    value: Any


class _Piece(NamedTuple):
    """A compiled part of a step, and the host calls that follow it."""

    run: Callable[..., Any]
    inputs: list[int]
    outputs: list[int]
    calls: list[_Equation]


class SplitStep:
    """A function with host calls, compiled in pieces for arguments of one structure and one set of shapes.

    Args:
        function: The function to trace.
        arguments: Example arguments.
        jit: Compiles a function; see `ModelCompiler.jit`.
        out_shardings: Shardings of the results; None: they stay on the device.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], jit: Jit, out_shardings: Any) -> None:
        def retraced(*arguments: Any) -> Any:  # JAX caches traces by function, and may have traced this one before
            return function(*arguments)

        # `_equations` and `_values` (the next free number) are only needed for construction. Each value of the flat
        # trace has a number, arguments first.
        closed, shape = jax.make_jaxpr(retraced, return_shape=True)(*arguments)
        self._equations: list[_Equation] = []
        self._values = len(closed.jaxpr.invars)
        results = self._inline(closed.jaxpr, closed.consts, list(range(self._values)))
        tree = jax.tree.structure(shape)
        self._last_out_shardings = out_shardings
        self._pieces = self._cut(results, tree, jit)
        del self._equations

    def __call__(self, *arguments: Any) -> Any:
        values: dict[int, Any] = dict(enumerate(jax.tree.leaves(arguments)))
        for piece in self._pieces:
            results = piece.run(*[values[number] for number in piece.inputs])
            if piece is self._pieces[-1]:
                break
            values.update(zip(piece.outputs, results, strict=True))
            for call in piece.calls:
                own = [np.asarray(_value(values, each)) for each in call.inputs]
                arrays = call.equation.params["function"](own)
                for number, array, form in zip(call.outputs, arrays, call.equation.params["results"], strict=True):
                    assert array.shape == form.shape, f"the trace expected {form}, and got {array.shape}"
                    values[number] = np.asarray(array, form.dtype)
        return results

    def _inline(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Append a trace to the flat one. Returns its results."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_Constant, constants), *inputs], strict=True))

        def read(atom: Any) -> Any:
            return _Constant(atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for equation in jaxpr.eqns:
            own = [read(atom) for atom in equation.invars]
            calls = [part for part in _inner_jaxprs(equation) if _has_host_calls(part)]
            if not calls:
                outputs = list(range(self._values, self._values + len(equation.outvars)))
                self._values += len(outputs)
                self._equations.append(_Equation(equation, jaxpr, own, outputs))
            elif equation.primitive.name in INLINED:
                outputs = self._inline(*_open_jaxpr(calls[0]), own)
            else:
                raise UnsupportedError(
                    f"A layer or loss needs the values of the other replicas inside a transformation of JAX "
                    f"({equation.primitive.name}): a loop or a branch that is compiled as one. Compute what it needs "
                    f"of them (a mask's sum, the batch's statistics) outside of it, before or after."
                )
            # Inlined or not, the outer trace continues with the numbers of the results.
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _cut(self, results: list[Any], tree: Any, jit: Jit) -> list[_Piece]:
        depths: dict[int, int] = {}  # of host calls that a value depends on
        calls: list[list[_Equation]] = []
        maker: dict[int, _Equation] = {}
        for equation in self._equations:
            # Calls of equal depth do not depend on each other, and run between the same two pieces.
            depth = max([depths.get(each, 0) for each in equation.inputs if isinstance(each, int)], default=0)
            if equation.equation.primitive is _host_call:
                if depth == len(calls):
                    calls.append([])
                calls[depth].append(equation)
                depth += 1
            depths.update(dict.fromkeys(equation.outputs, depth))
            maker.update(dict.fromkeys(equation.outputs, equation))
        # Prints and checks of the program: no result depends on them, so they run with the last piece.
        effects = [equation for equation in self._equations if equation.equation.effects]
        done = {number for each in calls for call in each for number in call.outputs}
        bodies = []
        for number in range(len(calls) + 1):
            is_last = number == len(calls)
            wanted = results if is_last else [each for call in calls[number] for each in call.inputs]
            if is_last:
                wanted = [*wanted, *[each for equation in effects for each in (*equation.outputs, *equation.inputs)]]
            body = self._needed(wanted, maker, done)
            if is_last:
                body += [equation for equation in effects if equation not in body and not equation.outputs]
            done.update(each for equation in body for each in equation.outputs)
            bodies.append(body)
        return self._compile(bodies, calls, results, tree, jit)

    def _needed(self, wanted: Sequence[Any], maker: dict[int, _Equation], done: set[int]) -> list[_Equation]:
        """Return the equations that compute these values from those that are done, in the order of the trace."""
        needed: set[int] = set()
        open_values = [each for each in wanted if isinstance(each, int)]
        while open_values:
            number = open_values.pop()
            if number in done or number not in maker or maker[number].outputs[0] in needed:
                continue
            needed.add(maker[number].outputs[0])
            open_values += [each for each in maker[number].inputs if isinstance(each, int)]
        return [each for each in self._equations if each.outputs and each.outputs[0] in needed]

    def _compile(
        self, bodies: list[list[_Equation]], calls: list[list[_Equation]], results: list[Any], tree: Any, jit: Jit
    ) -> list[_Piece]:
        # Backwards, because a piece returns exactly what later pieces and the calls after it need.
        used_later: set[int] = set()
        pieces: list[_Piece] = []
        for number in reversed(range(len(bodies))):
            body, is_last = bodies[number], number == len(calls)
            after = [] if is_last else calls[number]
            wanted = _numbers(results) if is_last else used_later | _numbers(*[call.inputs for call in after])
            made = {each for equation in body for each in equation.outputs}
            inputs = sorted((_numbers(*[equation.inputs for equation in body]) | (wanted if is_last else set())) - made)
            outputs = sorted(made & wanted)
            run = _evaluator(body, inputs, results, tree) if is_last else _evaluator(body, inputs, outputs, None)
            # No input is donated: a value may be an input of several pieces.
            compiled = jit(run, (), self._last_out_shardings if is_last else None)
            pieces.append(_Piece(compiled, inputs, outputs, after))
            used_later |= set(inputs) | _numbers(*[call.inputs for call in after])
        return pieces[::-1]


def _evaluator(
    body: list[_Equation], inputs: list[int], outputs: Sequence[Any], tree: Any | None
) -> Callable[..., Any]:
    """Return a function that computes equations. Its results form a tree, or a list if `tree` is None."""

    def run(*arguments: Any) -> Any:
        values: dict[int, Any] = dict(zip(inputs, arguments, strict=True))
        for compute, own, numbers in [(_single_equation_function(each), each.inputs, each.outputs) for each in body]:
            values.update(zip(numbers, compute(*[_value(values, each) for each in own]), strict=True))
        found = [_value(values, each) for each in outputs]
        return found if tree is None else jax.tree.unflatten(tree, found)

    return run


def _single_equation_function(one: _Equation) -> Callable[..., Any]:
    """Return a function that computes one equation."""
    equation = one.equation
    names = [atom for atom in equation.invars if not isinstance(atom, jex.Literal)]
    # Its own trace, which JAX evaluates for any primitive.
    trace = one.trace.replace(
        constvars=(), invars=names, outvars=equation.outvars, eqns=[equation], effects=equation.effects
    )
    compute = jex.jaxpr_as_fun(jex.ClosedJaxpr(trace, ()))

    def call(*values: Any) -> Any:
        variables = zip(equation.invars, values, strict=True)
        return compute(*[value for atom, value in variables if not isinstance(atom, jex.Literal)])

    return call


def _value(values: dict[int, Any], each: Any) -> Any:
    return each.value if isinstance(each, _Constant) else values[each]


def _numbers(*lists: Sequence[Any]) -> set[int]:
    return {each for one in lists for each in one if isinstance(each, int)}


def _inner_jaxprs(equation: Any) -> list[Any]:
    """Return the traces inside an equation."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, jex.Jaxpr | jex.ClosedJaxpr):
                found.append(each)
    return found


def _open_jaxpr(part: Any) -> tuple[Any, Sequence[Any]]:
    return (part.jaxpr, part.consts) if isinstance(part, jex.ClosedJaxpr) else (part, ())


def _has_host_calls(part: Any) -> bool:
    return any(
        equation.primitive is _host_call or any(map(_has_host_calls, _inner_jaxprs(equation)))
        for equation in _open_jaxpr(part)[0].eqns
    )
