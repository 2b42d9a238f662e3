"""A merged Llama with its tokenizer in other programs: transformers generates with it, llama.cpp converts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import epimer

transformers = pytest.importorskip("transformers")
CORPUS = ["the cat sat on the mat", "a dog ran to the red house", "blue birds sing in the morning"] * 20
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llamas(folder: Path, words: int, **tokens: int) -> list[Path]:
    """Save a tiny Llama and two models tuned from it."""
    paths = []
    for t, name in enumerate(("base", "one", "two")):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=words, **SIZES, **HEADS, **tokens)
        model = transformers.LlamaForCausalLM(config)
        noise = torch.Generator().manual_seed(t)
        with torch.no_grad():
            for W in model.parameters():
                W += 0.1 * t * torch.randn(W.shape, generator=noise)
        model.save_pretrained(folder / name)
        paths.append(folder / name)
    return paths


def merge(paths: list[Path], out: Path) -> dict[str, torch.Tensor]:
    """Merge into a folder by task arithmetic; return what it should hold, from float64."""
    base, *models = ({name: W.double() for name, W in load_file(p / "model.safetensors").items()} for p in paths)
    entries = [{"model": str(path), "parameters": {"weight": 0.5}} for path in paths[1:]]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(paths[0]), "models": entries}
    epimer.merge(recipe, out, progress=False)
    return {name: (W + 0.5 * sum(model[name] - W for model in models)).float() for name, W in base.items()}


def test_transformers_generates_the_same_text_as_with_weights_merged_by_hand(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(CORPUS, vocab_size=320, special_tokens=["<s>", "</s>"])
    words = tokenizer.get_vocab_size()
    paths = llamas(tmp_path, words, bos_token_id=0, eos_token_id=1)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    for path in paths:
        fast.save_pretrained(path)
    expected = merge(paths, tmp_path / "out")
    known = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    by_hand = transformers.AutoModelForCausalLM.from_pretrained(paths[0]).eval()
    by_hand.load_state_dict(expected, strict=True)
    inputs = known("the dog sat", return_tensors="pt")
    assert known.decode(inputs["input_ids"][0]) == "the dog sat"
    found, right = (one.generate(**inputs, max_new_tokens=12, do_sample=False) for one in (model, by_hand))
    assert found.shape[1] > inputs["input_ids"].shape[1]
    assert known.decode(found[0]) == known.decode(right[0])
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, by_hand(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_llama_cpp_converts_it_to_gguf(tmp_path):
    """Needs a copy of llama.cpp, whose folder is in the variable LLAMA_CPP, and sentencepiece."""
    pytest.importorskip("sentencepiece")
    place = os.environ.get("LLAMA_CPP")
    if not place:
        pytest.skip("LLAMA_CPP names no folder with llama.cpp's convert_hf_to_gguf.py")
    # Trained in another process: what sentencepiece writes on standard error is its own.
    train = "import sys, sentencepiece as s; s.SentencePieceTrainer.train(input=sys.argv[1], model_prefix=sys.argv[2], "
    train += "vocab_size=60, hard_vocab_limit=False, model_type='bpe')"
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    subprocess.run([sys.executable, "-c", train, tmp_path / "corpus.txt", tmp_path / "tokenizer"], check=True)
    count = "import sys, sentencepiece as s; print(s.SentencePieceProcessor(model_file=sys.argv[1]).vocab_size())"
    command = [sys.executable, "-c", count, tmp_path / "tokenizer.model"]
    words = int(subprocess.run(command, check=True, capture_output=True).stdout)
    paths = llamas(tmp_path, words, bos_token_id=1, eos_token_id=2)
    for path in paths:
        (path / "tokenizer.model").write_bytes((tmp_path / "tokenizer.model").read_bytes())
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    expected = merge(paths, tmp_path / "out")
    script, made = Path(place) / "convert_hf_to_gguf.py", tmp_path / "out.gguf"
    command = [sys.executable, script, tmp_path / "out", "--outtype", "f32", "--outfile", made]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    read = "import sys; sys.path.insert(0, sys.argv[1]); from gguf import GGUFReader; import numpy as np; "
    read += "np.savez(sys.argv[3], **{t.name: np.array(t.data) for t in GGUFReader(sys.argv[2]).tensors})"
    saved = tmp_path / "found.npz"
    subprocess.run([sys.executable, "-c", read, Path(place) / "gguf-py", made, saved], check=True)
    numpy = pytest.importorskip("numpy")
    found = numpy.load(saved)
    assert len([name for name in found.files if name.endswith("weight") and "rope" not in name]) == len(expected)
    same = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    same |= {f"blk.{t}.ffn_down.weight": f"model.layers.{t}.mlp.down_proj.weight" for t in range(2)}
    for ours, name in same.items():
        W = expected[name]
        torch.testing.assert_close(torch.from_numpy(found[ours]).reshape(W.shape), W, rtol=1e-5, atol=1e-6)
