"""Faults of scores."""

from __future__ import annotations

from mutants.fault import Fault

_SCALED_DOT = "src/attnscore/scores/scaled_dot.py"
_BILINEAR = "src/attnscore/scores/bilinear.py"
_GAUSSIAN = "src/attnscore/scores/gaussian.py"
_COSINE = "src/attnscore/scores/cosine.py"
_FORMS = "src/attnscore/scores/forms.py"
_ACTIVATIONS = "src/attnscore/scores/activations.py"
_CONTRACT = "src/attnscore/scores/base.py"
_COMBINATION = "src/attnscore/scores/combination.py"


def _extras(scores: str) -> str:
    """The pairs of scores and all else."""
    return f"tests/test_every_kernel.py -k 'against_the_oracle and {scores}'"


def _second_order(scores: str) -> str:
    """Second derivatives, which run in the streaming form, against those of the oracle."""
    return f"tests/test_gradients.py -k 'second_order_against_the_oracle and {scores}'"


def _streaming(scores: str) -> str:
    return f"tests/test_every_kernel.py -k 'against_the_oracle and streaming and {scores}'"


def _prepared(name: str) -> str:
    return f"tests/test_prepared_keys.py -k '{name}'"


FAULTS: list[Fault] = [
    Fault(
        "jax-rows-not-isolated-in-the-gradient",
        "src/attnscore/backends/jax/gradients.py",
        "clean = jnp.where(jnp.isfinite(x), x, 0.0)",
        "clean = x",
        "tests/test_jax_projections.py",
        "a masked key of NaN reaches the gradient of its projection's matrix",
    ),
    Fault(
        "bilinear-projects-the-larger-side",
        _BILINEAR,
        "return of_key < of_query",
        "return of_key > of_query",
        "tests/test_bilinear.py",
        "the bilinear score applies W to the side that takes more operations",
    ),
    Fault(
        "bilinear-side-without-the-pairs",
        _BILINEAR,
        "queries * dim * key_dim + pairs * key_dim, keys * dim * key_dim + pairs * dim",
        "queries * dim * key_dim, keys * dim * key_dim",
        "tests/test_bilinear.py -k operations",
        "the bilinear score applies W to fewer keys, though queries of more dimensions take longer products",
    ),
    Fault(
        "bilinear-gradient-of-unmasked-nan-keys",
        _BILINEAR,
        "x, grad = zero_isolated_rows(ops, x, grad)\n                arrays",
        "arrays",
        "tests/test_bilinear.py -k fewer",
        "a masked NaN key propagates to the gradient of W, where W is applied to the keys",
    ),
    Fault(
        "combination-rowwise-as-a-product",
        _COMBINATION,
        "elif not rowwise and isinstance",
        "elif isinstance",
        "tests/test_parallel_torch.py -k unequal",
        "ranks lower a sum of distances by the norms of their own queries and keys",
    ),
    Fault(
        "wrapper-not-rowwise",
        _CONTRACT,
        "return self.transform(ops, lower_rowwise(ops, self.score, query, key), query)",
        "return self.transform(ops, lower(ops, self.score, query, key), query)",
        "tests/test_parallel_torch.py -k unequal",
        "ranks lower a score inside a wrapper by their own lengths",
    ),
    Fault(
        "prepared-without-the-projection",
        "src/attnscore/scores/additive.py",
        "return projected, dataclasses.replace(self, W_k=None)",
        "return key, dataclasses.replace(self, W_k=None)",
        _prepared("test_what_is_prepared"),
        "the prepared keys of an additive score are not projected",
    ),
    Fault(
        "prepared-without-the-wrapper",
        _CONTRACT,
        "return key, dataclasses.replace(self, score=inner)",
        "return key, inner",
        _prepared("test_what_is_prepared"),
        "a cap or temperature is lost around prepared keys",
    ),
    Fault(
        "prepared-without-features",
        "src/attnscore/core/prepared.py",
        "return PreparedKeys(self.array() + features, self.score)",
        "return PreparedKeys(self.array(), self.score)",
        _prepared("test_added_features"),
        "the location term of the additive score is dropped",
    ),
    Fault(
        "prepared-keys-of-another-dtype",
        "src/attnscore/core/prepared.py",
        "ops.astype(_on_caller_axes(ops, layout, found, score), ops.dtype(key))",
        "_on_caller_axes(ops, layout, found, score)",
        _prepared("have_the_dtype"),
        "prepared keys are in the dtype of sums",
    ),
    Fault(
        "temperature-gradient-of-the-wrong-sign",
        "src/attnscore/scores/temperature.py",
        "ops.reshape(-grad / (T * T), self.T.shape)",
        "ops.reshape(grad / (T * T), self.T.shape)",
        "tests/test_every_score.py -k 'check_score and temperature-learned-dot'",
        "the gradient of a learned temperature has the wrong sign in NumPy",
    ),
    Fault(
        "cap-gradient-without-its-inner-part",
        "src/attnscore/scores/softcap.py",
        "outer - of_inverse / (cap * cap)",
        "outer",
        "tests/test_every_score.py -k 'check_score and soft_cap-learned-dot'",
        "the gradient of a learned cap leaves out that of scores / cap",
    ),
    Fault(
        "factor-gradient-of-the-scores",
        _FORMS,
        "form_vjp(times(ops, grad, self.factor))",
        "form_vjp(grad)",
        "tests/test_every_score.py -k 'check_score and soft_cap-learned-dot'",
        "the gradient of capped scores leaves a learned factor out",
    ),
    Fault(
        "bandwidths-without-the-keys-in-their-gradient",
        _GAUSSIAN,
        "ops.reshape(-(products[0] + products[1]) / bandwidth, self.bandwidth.shape)",
        "ops.reshape(-products[0] / bandwidth, self.bandwidth.shape)",
        "tests/test_every_score.py -k 'check_score and gaussian-dims'",
        "the gradient of a bandwidth for each dimension leaves the keys out",
    ),
    Fault(
        "scaled-dot-without-the-root",
        _SCALED_DOT,
        "return 1 / math.sqrt(max(1, query.shape[-1])) if",
        "return 1 / max(1, query.shape[-1]) if",
        _extras("scaled_dot"),
        "the default scale is 1 / dim in place of 1 / sqrt(dim)",
    ),
    Fault(
        "scaled-dot-gradient-without-a-learned-scale",
        _SCALED_DOT,
        '"key": grads["key"], name: grad * factor}',
        '"key": grads["key"], name: grad}',
        _extras("scaled_dot and numpy"),
        "the VJP of a learned scale leaves the scale out of the gradient of the query",
    ),
    Fault(
        "scaled-dot-scale-of-both-axes",
        _SCALED_DOT,
        "if not fits or 1 not in shape[-2:]:",
        "if not fits:",
        "tests/test_errors.py -k scale",
        "a scale that varies along queries and keys is let through",
    ),
    Fault(
        "bilinear-gradient-of-W-transposed",
        _CONTRACT,
        "        return ops.matmul(ops.matrix_transpose(x), grad)",
        "        return ops.reshape(ops.matmul(ops.matrix_transpose(grad), x), shape)",
        _extras("bilinear and numpy"),
        "the gradient of a projection is transposed, and reshaped to fit",
    ),
    Fault(
        "additive-without-bias",
        "src/attnscore/scores/additive.py",
        "        return projected + wide\n",
        "        return projected\n",
        _extras("additive-tanh"),
        "the bias of the additive score is left out",
    ),
    Fault(
        "additive-heads-interleaved",
        _CONTRACT,
        "return ops.reshape(x, (*splits[lead], *own))",
        "return ops.swap_axes(ops.reshape(x, (*splits[lead][::-1], *own)), 0, 1)",
        _extras("heads"),
        "a parameter per query head is laid out as (group, head) in place of (head, group)",
    ),
    Fault(
        "additive-masked-pairs-at-infinity",
        _FORMS,
        "hidden = ops.where(ops.expand_dims(visible, -1), hidden, 0.0)",
        "hidden = hidden + 0.0",
        "tests/test_nonfinite.py -k masked_infinity_and_second",
        "the additive form computes masked pairs of infinite rows, whose slope's slope is NaN",
    ),
    Fault(
        "quarantine-projects-bad-rows",
        _CONTRACT,
        "return ops.where(finite, function(ops.where(finite, x, 0.0)), isolated)",
        "return ops.where(finite, function(x), isolated)",
        "tests/test_nonfinite.py -k 'masked_entries and torch and (bilinear or additive)'",
        "a masked NaN reaches the gradient of a projection as 0 * NaN",
    ),
    Fault(
        "quarantine-in-the-pull-back",
        _CONTRACT,
        "return x if ops.known_finite(x) else ops.where(finite_rows(ops, x), x, 0.0)",
        "return x",
        "tests/test_nonfinite.py -k 'masked_entries and numpy'",
        "a masked NaN reaches the gradient of a projection written by hand",
    ),
    Fault(
        "gaussian-inner-product-without-two",
        _GAUSSIAN,
        "return InnerForm(query, key, scale=2 * scale,",
        "return InnerForm(query, key, scale=scale,",
        "tests/test_accuracy.py -k gaussian",
        "|q - k|^2 is expanded with q . k in place of 2 q . k",
    ),
    Fault(
        "gaussian-norms-without-the-scale",
        _GAUSSIAN,
        "query_bias, key_bias = (x * -scale for x in norms)",
        "query_bias, key_bias = (-x for x in norms)",
        "tests/test_accuracy.py -k gaussian",
        "the norms beside the inner product are not divided by 2 bandwidth^2",
    ),
    Fault(
        "gaussian-gradient-of-the-norms",
        _GAUSSIAN,
        'grads[name] - form.scale * x * grads[f"{name}_bias"]',
        'grads[name] - 0.5 * form.scale * x * grads[f"{name}_bias"]',
        "tests/test_accuracy.py tests/test_gradients.py -k 'gaussian and not gradcheck and not second'",
        "the gradient of the squared norms is half of what it is",
    ),
    Fault(
        "gaussian-bandwidth-power",
        _GAUSSIAN,
        "return grad_scale * -(bandwidth**-3)",
        "return grad_scale * -(bandwidth**-2)",
        _extras("gaussian-heads and numpy"),
        "the gradient of the bandwidth has its square where its cube belongs",
    ),
    Fault(
        "gaussian-inner-product-that-cancels",
        _GAUSSIAN,
        "INNER_LIMIT = 16.0",
        "INNER_LIMIT = 16.0e6",
        "tests/test_accuracy.py -k gaussian",
        "the Gaussian is an inner product also where that cancels",
    ),
    Fault(
        "distance-gradient-factor",
        _FORMS,
        "ops.expand_dims(grad * (-2 * self.scale), -1)",
        "ops.expand_dims(grad * -self.scale, -1)",
        _streaming("gaussian"),
        "the gradient of the squared distance lacks its factor of 2",
    ),
    Fault(
        "distance-gradient-sign-of-the-key",
        _FORMS,
        '"key": -ops.sum(difference_grad, axis=-3)}',
        '"key": ops.sum(difference_grad, axis=-3)}',
        _streaming("gaussian"),
        "the gradient of the keys has the sign of that of the queries",
    ),
    Fault(
        "cosine-slope-at-a-zero-vector",
        _COSINE,
        "return ops.where(zero, 0.0, x / norm)",
        "return x / norm",
        _extras("cosine and torch"),
        "a zero vector gets a gradient",
    ),
    Fault(
        "cosine-pull-back-at-a-zero-vector",
        _COSINE,
        "has_gradient = ops.any(unit != 0, axis=-1, keepdims=True) & ~ops.any",
        "has_gradient = ~ops.any",
        _extras("cosine and numpy"),
        "a zero vector gets a gradient where the VJP is written by hand",
    ),
    Fault(
        "cosine-gradient-along-the-vector",
        _COSINE,
        "(grad - unit * ops.sum(unit * grad, axis=-1, keepdims=True))",
        "grad",
        _extras("cosine and numpy"),
        "the gradient of a unit vector keeps its part along the vector",
    ),
    Fault(
        "cosine-gradient-without-the-largest",
        _COSINE,
        "keepdims=True)) / (norm * largest)",
        "keepdims=True)) / norm",
        _extras("cosine and numpy"),
        "the gradient of a unit vector is divided by the norm of the rescaled vector",
    ),
    Fault(
        "soft-cap-slope",
        _FORMS,
        "slope = factor * (1 - bounded * bounded)",
        "slope = factor * (1 - bounded)",
        _streaming("soft_cap"),
        "the slope of the soft cap is 1 - tanh in place of 1 - tanh^2",
    ),
    Fault(
        "temperature-multiplies",
        "src/attnscore/scores/temperature.py",
        "dtype, factor = accumulator(ops.dtype(query)), 1 / float(self.T)",
        "dtype, factor = accumulator(ops.dtype(query)), float(self.T)",
        _extras("temperature"),
        "scores are multiplied by the temperature in place of divided",
    ),
    Fault(
        "inner-form-rescaled-anew",
        _FORMS,
        "if self.caps or self.key_bias is not None or self.query_bias is not None:\n"
        "            return super().scaled(factor)\n"
        "        return dataclasses.replace(self, scale=self.scale * factor)",
        "if self.caps or self.key_bias is not None or self.query_bias is not None:\n"
        "            return super().scaled(factor)\n"
        "        return dataclasses.replace(self, scale=factor)",
        _extras("temperature"),
        "a temperature replaces the scale of the score inside it",
    ),
    Fault(
        "inner-form-norms-not-scaled",
        _FORMS,
        "if self.caps or self.key_bias is not None or self.query_bias is not None:",
        "if self.caps:",
        "tests/test_gradients.py -k temperature",
        "a temperature over a Gaussian divides the inner product and not the norms",
    ),
    Fault(
        "inner-form-gradient-of-keys",
        _FORMS,
        '"key": ops.matmul(ops.matrix_transpose(grad), query),',
        '"key": ops.matmul(ops.matrix_transpose(grad), self.query),',
        _streaming("scaled_dot"),
        "the gradient of the keys leaves out the scale",
    ),
    Fault(
        "activation-tanh-slope",
        _ACTIVATIONS,
        "lambda ops, x, y: 1 - y * y",
        "lambda ops, x, y: 1 - x * x",
        _streaming("additive-tanh"),
        "the slope of tanh takes the input for the output",
    ),
    Fault(
        "activation-sigmoid-slope",
        _ACTIVATIONS,
        "lambda ops, x, y: y * (1 - y)",
        "lambda ops, x, y: y * (1 - x)",
        _second_order("sigmoid"),
        "the slope of the sigmoid takes the input for the output",
    ),
    Fault(
        "activation-relu-slope",
        _ACTIVATIONS,
        "lambda ops, x, y: _step(ops, x, 0.0)",
        "lambda ops, x, y: _step(ops, x, 1.0)",
        _second_order("relu"),
        "relu has slope 1 below 0",
    ),
    Fault(
        "activation-leaky-relu-slope",
        _ACTIVATIONS,
        "lambda ops, x, y: _step(ops, x, negative_slope)",
        "lambda ops, x, y: _step(ops, x, 0.0)",
        _second_order("leaky_relu"),
        "leaky_relu has slope 0 below 0",
    ),
    Fault(
        "activation-silu-slope",
        _ACTIVATIONS,
        "return gate * (1 + x * (1 - gate))",
        "return gate * (1 + (1 - gate))",
        _second_order("silu"),
        "the slope of silu leaves out its input",
    ),
    Fault(
        "activation-gelu-slope",
        _ACTIVATIONS,
        "(1 + ops.erf(x * math.sqrt(0.5))) + x * density",
        "(1 + ops.erf(x * math.sqrt(0.5))) + density",
        _streaming("additive-gelu"),
        "the slope of gelu leaves out its input",
    ),
    Fault(
        "sum-form-as-a-product",
        "src/attnscore/scores/sum.py",
        "ops.concat((ones[1], sums[1]), -1)",
        "ops.concat((sums[1], ones[1]), -1)",
        _extras("sum"),
        "the sum score pairs its columns wrongly",
    ),
    Fault(
        "sum-pull-back-of-keys",
        "src/attnscore/scores/sum.py",
        'ops.broadcast_to(grads["key"][..., 1:],',
        'ops.broadcast_to(grads["key"][..., :1],',
        _extras("sum and numpy"),
        "the gradient of the keys under the sum score is read from the column of ones",
    ),
    Fault(
        "widen-to-the-narrower",
        _CONTRACT,
        "target = max(map(accumulator, dtypes), key=_WIDTHS.__getitem__)",
        "target = min(map(accumulator, dtypes), key=_WIDTHS.__getitem__)",
        "tests/test_every_kernel.py -k 'another_dtype and streaming'",
        "arrays of two dtypes are computed on in the narrower",
    ),
    Fault(
        "sum-in-16-bits",
        "src/attnscore/scores/sum.py",
        "        query, key = widen(ops, query, key)\n",
        "",
        "tests/test_accuracy.py -k sum_score",
        "the sums of 16-bit vectors are rounded to 16 bits",
    ),
    Fault(
        "combination-factor-left-out-of-the-query-gradient",
        _COMBINATION,
        '"query": of_queries[i] * inner[i]',
        '"query": of_queries[i]',
        _extras("combination"),
        "the gradient of a query in a weighted sum of products lacks the weight",
    ),
    Fault(
        "combination-bias-without-its-weight",
        _COMBINATION,
        "own[name] = sum_to(ops, grads[name] * numbers[i], x.shape)",
        "own[name] = sum_to(ops, grads[name], x.shape)",
        "tests/test_combination.py",
        "the gradient of a query or key bias in a weighted sum lacks the weight",
    ),
    Fault(
        "combination-gradients-cut-at-the-wrong-place",
        _COMBINATION,
        "        start = stop\n",
        "        start = stop - 1\n",
        _extras("combination"),
        "gradients of concatenated arrays are cut one channel early",
    ),
    Fault(
        "combination-w_v-without-its-weight",
        _COMBINATION,
        '"w_v": separated["w_v"][i] * numbers[i]',
        '"w_v": separated["w_v"][i]',
        _extras("combination"),
        "the gradient of w_v in a weighted sum lacks the weight",
    ),
    Fault(
        "combination-joins-different-activations",
        _COMBINATION,
        "return (activation.name, activation.negative_slope) == (other.name, other.negative_slope)",
        "return True",
        "tests/test_combination.py",
        "additive scores of different activations are joined into one",
    ),
]
