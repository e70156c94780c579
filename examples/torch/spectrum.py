"""The extreme eigenvalues of a model's Hessian, without any training by FOSI.

``estimate_spectrum`` runs Lanczos on the loss it is handed: the k largest and ell smallest eigenpairs, a bound on the
error of each, and whether FOSI would use it. Eigenvectors are shaped like the parameters, by name where a module was
given.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from fosi.torch import estimate_spectrum

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)


def spectrum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss_fn(model(inputs), labels).backward()
        optimizer.step()
    return model, estimate_spectrum(lambda: loss_fn(model(inputs), labels), model, k=6, ell=2, num_matvecs=60)


if __name__ == "__main__":
    model, found = spectrum()
    print("eigenvalue   error at most   FOSI uses it")
    for value, residual, accepted in zip(found.eigenvalues, found.residuals, found.accepted, strict=True):
        print(f"{value:10.4f}   {residual:13.1e}   {'yes' if accepted else 'no'}")
    share = found.eigenvectors["2.weight"][0].square().sum()
    print(f"{share:.0%} of the first eigenvector lies in the last layer's weights")
