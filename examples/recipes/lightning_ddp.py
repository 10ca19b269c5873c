"""Lightning: the gradients of DDPStrategy, compressed.

python examples/recipes/lightning_ddp.py
"""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.torch import GradwireState, gradwire_hook

EPOCHS = 8


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.losses: list[float] = []

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class CompressGradients(lightning.Callback):
    """Registers the hook when the model is in DDP, on CPUs and on GPUs."""

    def __init__(self, state: GradwireState) -> None:
        self.state = state

    def on_train_start(self, trainer, _):
        trainer.strategy.model.register_comm_hook(self.state, gradwire_hook)

    def on_train_epoch_end(self, trainer, module):
        loss = sum(module.losses) / len(module.losses)
        module.losses.clear()
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch + 1}: loss {loss:.3f}")


lightning.seed_everything(0)
inputs = torch.randn(1600, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
state = GradwireState(codec="3lc:s=1.00,coder=rice")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    callbacks=[CompressGradients(state)],
    max_epochs=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True))
if trainer.is_global_zero:
    print(state.stats())
state.close()
torch.distributed.destroy_process_group()
