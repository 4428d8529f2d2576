"""The truth of the red team's own tasks, in plain PyTorch."""

import torch
import torch.nn.functional as F


def rt_bias_gelu(acc, bias):
    return {"y": F.gelu(acc + bias)}


def rt_aux(acc, alpha, residual):
    y = alpha * acc + residual
    return {"d": acc, "y": y, "r": y.clamp_min(0)}


def rt_row_stats(acc):
    return {"z": acc, "total": acc.sum(-1), "top": acc.amax(-1), "peak": acc.abs().amax(-1)}


def rt_col_stats(acc, x):
    return {"z": acc, "total": acc.sum(0), "top": acc.amax(0), "dot": (acc * x).sum(0)}


def rt_both_ways(acc):
    return {"z": acc, "rows": acc.sum(-1), "columns": acc.sum(0)}


def rt_head_norm(acc, hrstd, weight):
    heads = acc.unflatten(-1, (-1, 128))
    return {"y": (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2) * weight}


def rt_soft_cap(acc):
    return {"y": 5 * torch.tanh(acc / 5)}


def rt_leaky(acc, scale):
    return {"y": F.leaky_relu(acc * scale[:, None], 0.125)}
