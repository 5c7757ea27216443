"""sentence-transformers: torchrun --standalone --nproc-per-node 2 sentence_transformers_trainer.py"""

import os

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from contrastive_zoo.adapters.sentence_transformers import DistributedSentenceLoss

# pairs that need no download: numbers in digits and in words. Use your texts here.
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
numbers = [str(i) for i in range(1000, 1640)]
pairs = {
    "anchor": [" ".join(number) for number in numbers],
    "positive": [" ".join(WORDS[int(x)] for x in number) for number in numbers],
}

# a small model that needs no download. Use SentenceTransformer("…") here.
vocabulary = {word: i for i, word in enumerate(["[UNK]", *"0123456789", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)  # equal parameters on all processes
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")

loss_fn = DistributedSentenceLoss(losses.MultipleNegativesRankingLoss(model))
per_process = 64 // int(os.environ.get("WORLD_SIZE", "1"))
arguments = SentenceTransformerTrainingArguments(
    "output",
    per_device_train_batch_size=per_process,
    dataloader_drop_last=True,
    num_train_epochs=2,
    learning_rate=1e-2,
    use_cpu=True,
    ddp_find_unused_parameters=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=Dataset.from_dict(pairs), loss=loss_fn)
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    print(f"mean loss {loss}")
