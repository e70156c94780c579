"""The Lightning callback: it refreshes when due, on the right batches, and leaves no other trace."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fosi.torch import FOSI

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

from fosi.torch.lightning import RefreshCallback  # noqa: E402

OPTIONS = {"k": 2, "warmup": 2, "refresh_every": 3, "alpha": 0.1, "accept": "all"}
BATCHES = 6


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * BATCHES, 5, generator=generator) * torch.tensor([5.0, 2.0, 1.0, 1.0, 0.2])
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)


def loss_of(module, batch):
    return nn.functional.mse_loss(module.net(batch[0]), batch[1])


class Model(pl.LightningModule):
    """With all that a second call of training_step could disturb."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.options = {**OPTIONS, **options}
        self.autocast = []

    def training_step(self, batch, batch_idx):
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        loss = loss_of(self, batch)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"index": float(batch_idx), "mean": self.mean}, on_step=False, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self):
        opt = FOSI(torch.optim.AdamW(self.parameters(), lr=0.01), model=self, **self.options)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.9)]


def trainer(*callbacks, lightning=pl, max_epochs=2, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"max_epochs": max_epochs, "accelerator": "cpu", "logger": False, **quiet, **settings}
    return lightning.Trainer(callbacks=list(callbacks), **settings)


def fit(model, *callbacks, ckpt_path=None, **settings):
    torch.manual_seed(7)  # of dropout
    fitting = trainer(*callbacks, **settings)
    fitting.fit(model, data(), ckpt_path=ckpt_path)
    return fitting


def assert_same(model, other):
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def by_hand(accumulate, clip, max_epochs=2):
    """The loop Lightning runs, written out."""
    model = Model()
    (opt,), (scheduler,) = model.configure_optimizers()
    torch.manual_seed(7)
    for _ in range(max_epochs):
        window = []
        for i, batch in enumerate(data()):
            loss = loss_of(model, batch) / accumulate
            if i % accumulate == 0:
                opt.zero_grad()
            loss.backward()
            window.append(lambda batch=batch: loss_of(model, batch))
            if (i + 1) % accumulate and i + 1 < BATCHES:
                continue
            if opt.refresh_due:
                opt.refresh(window)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            window = []
        scheduler.step()
    return model, opt


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.1), (2, None), (4, 0.1)])
def test_it_is_the_loop_written_out(accumulate, clip):
    model = Model()
    fitted = fit(model, RefreshCallback(), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    expected, opt = by_hand(accumulate, clip)
    assert_same(model.net, expected.net)
    state = fitted.optimizers[0].state_dict()["state"][0]
    assert state["fosi_refreshes"] == opt.state_dict()["state"][0]["fosi_refreshes"] >= 1
    assert not torch.equal(model.net[0].weight, without_refresh(accumulate, clip).net[0].weight)


def without_refresh(accumulate, clip):
    model = Model()
    fit(model, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_refreshes_exactly_when_due(accumulate):
    asked = []

    def loss(module, batch):
        asked.append((module.global_step, batch[0][0, 0].item()))
        return loss_of(module, batch)

    fit(Model(), RefreshCallback(loss), accumulate_grad_batches=accumulate, max_epochs=2)
    steps = 2 * BATCHES // accumulate
    assert sorted({step for step, _ in asked}) == [t for t in range(steps) if t >= 2 and (t - 2) % 3 == 0]
    # And on the batches of that very step, each as often as the others.
    firsts = [x[0, 0].item() for x, _ in data()] * 2
    for step in {step for step, _ in asked}:
        assert {x for t, x in asked if t == step} == set(firsts[step * accumulate : (step + 1) * accumulate])


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}])
def test_logging_metrics_and_buffers_see_nothing_of_it(settings):
    model, pure = Model(), Model()
    fitted = fit(model, RefreshCallback(), **settings)
    expected = fit(pure, RefreshCallback(loss_of), **settings)
    assert_same(model, pure)
    assert fitted.optimizers[0].state_dict()["state"][0]["fosi_refreshes"] >= 2
    assert fitted.callback_metrics.keys() == expected.callback_metrics.keys() >= {"loss_step", "loss_epoch", "mean"}
    for name, value in fitted.callback_metrics.items():
        assert torch.equal(value, expected.callback_metrics[name]), name
    assert model.net[1].num_batches_tracked == 2 * BATCHES
    assert len(model.autocast) > len(pure.autocast) == 2 * BATCHES  # it was called more often, though
    assert not {"log", "log_dict"} & vars(model).keys()
    assert model.mean is model._modules["mean"] and len(fitted.optimizers[0].param_groups) == 1


def test_resuming_from_a_checkpoint_is_bitwise(tmp_path):
    # Dropout's random numbers are not in a Lightning checkpoint.
    def model():
        made = Model(k=2, ell=1, refresh_every=4)
        made.net[3] = nn.Identity()
        return made

    whole, first, second = model(), model(), model()
    fit(whole, RefreshCallback(), max_epochs=4)
    fit(first, RefreshCallback(), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(second, RefreshCallback(), max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert_same(whole.net, second.net)
    assert resumed.global_step == 4 * BATCHES
    assert resumed.optimizers[0].state_dict()["state"][0]["fosi_refreshes"] == 6  # t = 2, 6, … 22
    assert not torch.equal(whole.net[0].weight, first.net[0].weight)


def test_autocast_is_off_in_a_refresh():
    model, seen = Model(), []
    fit(model, RefreshCallback(), precision="bf16-mixed", max_epochs=1)
    assert model.autocast == [True, True, True, False, True, True, True, False][: len(model.autocast)]
    assert len(model.autocast) == BATCHES + 2

    def loss(module, batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        return loss_of(module, batch)

    fit(Model(), RefreshCallback(loss), precision="bf16-mixed", max_epochs=1)
    assert seen == [False, False]


class Manual(Model):
    """Two optimizers, one of them FOSI."""

    def __init__(self, refreshes_itself=False):
        super().__init__()
        self.automatic_optimization = False
        self.refreshes_itself = refreshes_itself

    def training_step(self, batch, batch_idx):
        fosi, sgd = self.optimizers()
        fosi.zero_grad()
        sgd.zero_grad()
        self.manual_backward(loss_of(self, batch))
        if self.refreshes_itself and fosi.refresh_due:
            fosi.refresh(lambda: loss_of(self, batch))
        fosi.step()
        sgd.step()

    def configure_optimizers(self):
        fosi = FOSI(torch.optim.AdamW(self.net[0].parameters(), lr=0.01), model=self, **self.options)
        return fosi, torch.optim.SGD(self.net[4].parameters(), lr=0.01)


def test_manual_optimization_with_two_optimizers():
    by_callback, by_itself, by_neither = Manual(), Manual(refreshes_itself=True), Manual()
    fitted = fit(by_callback, RefreshCallback(loss_of))
    fit(by_itself)
    fit(by_neither)
    assert fitted.optimizers[0].state_dict()["state"][0]["fosi_refreshes"] == 4  # t = 2, 5, 8, 11
    assert_same(by_callback.net, by_itself.net)
    assert not torch.equal(by_callback.net[0].weight, by_neither.net[0].weight)


def test_what_cannot_work_is_said_before_the_first_step(caplog):
    with pytest.raises(ValueError, match="needs loss="):
        fit(Manual(), RefreshCallback())
    with pytest.raises(TypeError, match="loss must be a function"):
        RefreshCallback(loss=0.1)

    class Plain(Model):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    fit(Plain(), RefreshCallback(), max_epochs=1)
    assert "none of the Trainer's optimizers is a FOSI" in caplog.text


def test_a_module_that_was_not_handed_to_fosi_keeps_its_buffers():
    class Forgetful(Model):
        def configure_optimizers(self):
            return FOSI(torch.optim.AdamW(self.parameters(), lr=0.01), **self.options)

        def training_step(self, batch):  # and takes no index
            return loss_of(self, batch)

    model = Forgetful()
    fitted = fit(model, RefreshCallback())
    assert fitted.optimizers[0].spectrum is not None
    assert model.net[1].num_batches_tracked == 2 * BATCHES


def test_the_trainer_of_the_other_package():
    other = pytest.importorskip("pytorch_lightning")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "2"]
    assert not issubclass(RefreshCallback, other.Callback)  # where both are imported, it is lightning's


OTHER = """
import sys
import pytorch_lightning as pl
import torch
from fosi.torch import FOSI
from fosi.torch.lightning import RefreshCallback

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return FOSI(torch.optim.Adam(self.parameters()), model=self, k=2, warmup=0, accept="all")

trainer = pl.Trainer(max_steps=2, accelerator="cpu", callbacks=[RefreshCallback()], logger=False, barebones=True)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=8))
print(issubclass(RefreshCallback, pl.Callback), "lightning.pytorch" in sys.modules)
print(int(trainer.optimizers[0].spectrum.accepted.sum()))
"""


def test_without_lightning_the_error_says_so():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lightning", "pytorch_lightning", "torchmetrics"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import fosi.torch
try:
    import fosi.torch.lightning
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("fosi.torch.lightning needs Lightning: pip install lightning"), done.stderr
