"""The Hugging Face Trainer, pairs of texts: torchrun --standalone --nproc-per-node 2 huggingface.py"""

import os

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import contrastive_zoo as cz
from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin

# pairs that need no download: numbers in digits and in words. Use your texts, AutoTokenizer and AutoModel here.
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
pairs = [(" ".join(str(i)), " ".join(WORDS[int(x)] for x in str(i))) for i in range(1000, 1640)]
vocabulary = {"[PAD]": 0} | {word: i + 1 for i, word in enumerate([*"0123456789", *WORDS])}


def tokenize(texts):
    ids = nn.utils.rnn.pad_sequence([torch.tensor([vocabulary[x] for x in text.split()]) for text in texts], True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def collate(batch):
    queries, texts = zip(*batch, strict=True)
    return {"queries": tokenize(queries), "texts": tokenize(texts)}


class PairModel(nn.Module):
    """One encoder for both texts of a pair, with the loss inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # to compare numbers
        config = BertConfig(vocab_size=len(vocabulary), **size, **no_dropout)
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.loss_fn = cz.DistributedLoss(cz.InfoNCE(temperature=0.05))

    def embed(self, tokens):
        states, mask = self.encoder(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        return (states * mask).sum(1) / mask.sum(1)  # the mean over the tokens of a text

    def forward(self, queries, texts):
        return {"loss": self.loss_fn(self.embed(queries), self.embed(texts))}


class PairTrainer(ContrastiveTrainerMixin, Trainer):
    """A Trainer that does not multiply the loss by the number of processes."""


per_process = 64 // int(os.environ.get("WORLD_SIZE", "1"))
arguments = TrainingArguments(
    "output", per_device_train_batch_size=per_process, dataloader_drop_last=True, num_train_epochs=2, learning_rate=1e-3,
    remove_unused_columns=False, ddp_find_unused_parameters=False, use_cpu=True, report_to=[], save_strategy="no",
)  # fmt: skip
trainer = PairTrainer(PairModel(), arguments, train_dataset=pairs, data_collator=collate)
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    print(f"mean loss {loss}")
