"""Tiny GGUF files that hold a tokenizer and no weights."""

from pathlib import Path

LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz.,!?0123456789"]
WORDS = ["▁t", "he", "▁the", "an", "▁an", "in", "ing", "er"]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"]
DEFINED = ["\n", "\n\n", "  ", "   "]  # Gemma's file has several spaces as spaces, and matches these as they are
GEMMA = [*SPECIAL, *DEFINED, *(f"<0x{i:02X}>" for i in range(256)), *WORDS, *LETTERS]
# text -> the tokens of it, joined by hand in the order of the vocabulary
GEMMA_TEXTS = {
    "the thing": ["t", "he", "▁t", "h", "ing"],
    " the an": ["▁the", "▁an"],
    "in  an\n\nanother": ["in", "▁▁", "an", "\n\n", "an", "o", "t", "he", "r"],
    "<start_of_turn>er": ["<start_of_turn>", "er"],
    "É": ["<0xC3>", "<0x89>"],
}


def write_gemma(path: Path) -> Path:
    """Gemma's kind of tokenizer: SentencePiece's tokens with scores, and no merges."""
    import gguf

    kinds = {token: 3 for token in SPECIAL} | {token: 4 for token in DEFINED}
    types = [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in GEMMA]
    first = GEMMA.index(WORDS[0])
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA)
    writer.add_token_types(types)
    writer.add_token_scores([{1: float(first - i), 6: 0.0}.get(kind, -1000.0) for i, kind in enumerate(types)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    return close(writer, path)


def close(writer, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
