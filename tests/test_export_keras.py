"""Keras layers exported to SavedModel and TensorFlow Lite: numbers at lengths that were not seen, and reasons.

One process exports all models; a second one, in which the package cannot be imported, runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXPORT = """
import json, sys, warnings
import keras, numpy as np, tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from attnscore.compat import keras as compat
from attnscore.layers import keras as layers

warnings.simplefilter("ignore")
folder, callbacks, reasons = sys.argv[1], {}, {}

def heads(score="scaled_dot", **more):
    return layers.MultiHeadAttention(8, 2, score=score, **more), lambda layer, q, v: layer(q, v, v)

LAYERS = {
    "dot": (layers.DotProductAttention(), lambda layer, q, v: layer(q, v, v)),
    "additive": (layers.AdditiveAttention(6), lambda layer, q, v: layer(q, v, v)),
    "bilinear": (layers.BilinearAttention(), lambda layer, q, v: layer(q, v, v)),
    "gaussian": (layers.GaussianAttention(1.5, learn_bandwidth=True), lambda layer, q, v: layer(q, v, v)),
    "heads": heads(), "heads, bilinear": heads("bilinear"), "heads, gaussian": heads("gaussian"),
    "heads, cosine": heads("cosine"), "heads, additive": heads("additive"),
    "heads, sink, norms, grouped": heads(sink=True, qk_norm=True, num_key_value_heads=1),
    "Attention": (compat.Attention(), lambda layer, q, v: layer([q, v])),
    "AdditiveAttention": (compat.AdditiveAttention(), lambda layer, q, v: layer([q, v], use_causal_mask=True)),
    "MultiHeadAttention": (compat.MultiHeadAttention(2, 4), lambda layer, q, v: layer(q, v, use_causal_mask=True)),
    "GroupQueryAttention": (compat.GroupQueryAttention(4, 4, 2), lambda layer, q, v: layer(q, v)),
}
rng = np.random.default_rng(0)
given = {f"{side}{n}": rng.standard_normal((3, n, 8)).astype("float32") for n in (4, 9, 290, 600) for side in "qv"}
PAIRS, KNOWN = ((4, 9), (9, 4), (600, 600)), (600, 290)

def lite(model, path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = tf.lite.TFLiteConverter.from_keras_model(model).convert()
        except Exception as error:
            reasons[path] = " ".join([str(error), *(str(x.message) for x in said)])
        else:
            open(f"{folder}/{path}.tflite", "wb").write(found)

known = dict(given)
for name, (layer, call) in LAYERS.items():
    inputs = [keras.Input((None, 8), name="q"), keras.Input((None, 8), name="v")]
    model = keras.Model(inputs, call(layer, *inputs))
    for x in layer.trainable_weights:
        x.assign(rng.standard_normal(x.shape) * 0.4)
    for n, m in (*PAIRS, KNOWN):
        known[f"{name} {n} {m}"] = model([given[f"q{n}"], given[f"v{m}"]]).numpy()
    model.export(f"{folder}/{name}", verbose=False)
    found = saved_model_pb2.SavedModel.FromString(open(f"{folder}/{name}/saved_model.pb", "rb").read())
    functions = [f.node_def for graph in found.meta_graphs for f in graph.graph_def.library.function]
    callbacks[name] = sorted({node.op for nodes in functions for node in nodes if "PyFunc" in node.op})
    lite(model, name)
    inputs = [keras.Input((n, 8), name=side) for n, side in zip(KNOWN, "qv")]
    lite(keras.Model(inputs, call(layer, *inputs)), name + ", known lengths")
np.savez(folder + "/known.npz", **known)
print(json.dumps({"names": list(LAYERS), "pairs": PAIRS, "known": KNOWN, "callbacks": callbacks, "reasons": reasons}))
"""

RUN = """
import json, sys, warnings
import numpy as np, tensorflow as tf

warnings.simplefilter("ignore")  # the interpreter's own: it moves to another package
sys.modules["attnscore"] = None
folder, said = sys.argv[1], json.loads(sys.argv[2])
known, errors = np.load(folder + "/known.npz"), {}
resolver = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES

def lite(path, options, q, v):
    model = tf.lite.Interpreter(f"{folder}/{path}.tflite", **options)
    places = sorted(model.get_input_details(), key=lambda x: x["name"])
    for place, x in zip(places, (q, v)):
        model.resize_tensor_input(place["index"], x.shape)
    model.allocate_tensors()
    for place, x in zip(places, (q, v)):
        model.set_tensor(place["index"], x)
    model.invoke()
    return model.get_tensor(model.get_output_details()[0]["index"])

for name in said["names"]:
    served = tf.saved_model.load(f"{folder}/{name}")
    for n, m in (*said["pairs"], said["known"]):
        q, v, wanted = known[f"q{n}"], known[f"v{m}"], known[f"{name} {n} {m}"]
        found = {"": served.serve([q, v]).numpy()}
        if [n, m] == said["known"]:
            path, options = name + ", known lengths", {}
        else:
            path, options = name, {"experimental_op_resolver_type": resolver}
        if path not in said["reasons"]:
            found["lite"] = lite(path, options, q, v)
        errors |= {f"{name} {n} {m} {how}": float(abs(out - wanted).max()) for how, out in found.items()}
print(json.dumps(errors))
"""


def run(*command: str) -> Any:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    line = [sys.executable, "-c", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_exported_layers_run_without_the_package(tmp_path: Path) -> None:
    """Every layer; what TensorFlow Lite cannot run is refused when it is converted."""
    said = run(EXPORT, str(tmp_path))
    assert not any(said["callbacks"].values()), said["callbacks"]
    reasons = dict(said["reasons"])
    additive = ["heads, additive", "heads, additive, known lengths"]
    assert sorted(reasons) == ["AdditiveAttention", "MultiHeadAttention", *additive]
    assert all("BatchMatMulV2" in reasons.pop(name) for name in additive)
    assert all("mask: expected known lengths of queries and keys" in reason for reason in reasons.values()), reasons
    errors = run(RUN, str(tmp_path), json.dumps(said))
    count = len(said["names"])
    assert len(errors) == 4 * count + 3 * (count - 3) + count - 1
    assert max(errors.values()) < 1e-5, {name: x for name, x in errors.items() if x >= 1e-5}
