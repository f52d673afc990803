"""Layers that take a chosen time: the twin of bench/layer_stack.cpp. Their gradients are zeros."""

import torch


def read(weight):
    """Any operator on it will do: the library has gathered it when that returns."""
    weight.flatten().narrow(0, 0, 1).sum()


class Occupy(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, layer):
        context.save_for_backward(weight)
        context.layer = layer
        with torch.enable_grad():
            read(weight)
        layer.occupy(layer.forward_us, f"forward {layer.number}")
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        (weight,) = context.saved_tensors
        read(weight)
        layer = context.layer
        layer.occupy(layer.backward_us, f"backward {layer.number}")
        return gradient, torch.zeros_like(weight), None


class TimedLayer(torch.nn.Module):
    """occupy(microseconds, name): keeps busy what computes."""

    def __init__(self, about, number, device, occupy):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(*about["params"][0], device=device))
        self.number, self.occupy = number, occupy
        self.forward_us, self.backward_us = about["forward_us"], about["backward_us"]

    def forward(self, x):
        return Occupy.apply(x, self.weight, self)


def stack_of(abouts, device, occupy):
    return torch.nn.Sequential(*(TimedLayer(about, number, device, occupy) for number, about in enumerate(abouts)))
