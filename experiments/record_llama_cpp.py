"""Records what llama.cpp predicts for a fixed text: token ids and the most likely next token at each position.

A test compares our own forward with the recorded values, so that it needs no llama.cpp. To make them again:

    pip install llama-cpp-python==0.3.36 gguf       # CMAKE_ARGS below if the native build crashes on this processor
    python experiments/record_llama_cpp.py MODEL.gguf > tests/golden/smollm2_llama_cpp.json

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"

With quantised weights llama.cpp also rounds the activations to 8 bits, which moves logits by some tenths and decides
near ties. So it runs twice: on the file as it is, and on a copy whose weights are expanded to float32 (K/V in float32
too), which is the same arithmetic as ours.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

# Chat markup, prose, code, digits and letters outside ASCII: every branch of the pre-tokenizer.
TEXT = (
    "<|im_start|>user\nWhat is the capital of France, and how many people live there?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris. It's home to about 2,100,000 people.\n\n"
    "def add(a, b):\n    return a + b\n\nDas Müllerstraße-Café öffnet um 9 Uhr."
)


def expand(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a GGUF file with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def predict(path: pathlib.Path, **options: Any) -> tuple[list[int], np.ndarray]:
    """Runs llama.cpp over TEXT; returns the token ids and f32[T, V] logits."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    model = llama_cpp.Llama(str(path), n_ctx=512, n_threads=2, logits_all=True, verbose=False, **options)
    tokens = model.tokenize(TEXT.encode(), add_bos=False, special=True)
    model.eval(tokens)
    return tokens, np.array(model.scores[: len(tokens)])


def record(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the test needs."""
    tokens, quantized = predict(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "expanded.gguf"
        expand(path, copy)
        float32 = 0  # GGML_TYPE_F32
        _, expanded = predict(copy, type_k=float32, type_v=float32, flash_attn=False)
    return {
        "command": "python experiments/record_llama_cpp.py MODEL.gguf (llama-cpp-python 0.3.36)",
        "model": path.name,
        "text": TEXT,
        "tokens": tokens,
        "argmax": expanded.argmax(axis=-1).tolist(),
        "largest_logit": [round(float(value), 4) for value in expanded.max(axis=-1)],
        "argmax_quantized": quantized.argmax(axis=-1).tolist(),
    }


def main(argv: list[str]) -> None:
    """Prints the record of the GGUF file named on the command line, as JSON."""
    if len(argv) != 2:
        sys.exit("usage: record_llama_cpp.py MODEL.gguf")
    text = json.dumps(record(pathlib.Path(argv[1])), indent=None, ensure_ascii=False)
    print(text.replace(', "', ',\n "'))


if __name__ == "__main__":
    main(sys.argv)
