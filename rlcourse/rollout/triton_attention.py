"""Decode attention in Triton: one query token of a row against its cache. `triton_step.py` launches it."""

import triton
import triton.language as tl

from rlcourse.rollout.triton_kernels import gdc_launch_dependents, gdc_wait


@triton.jit
def attend(query, keys, values, seen, scale, m, l, acc):
    """Joins a block of tokens: keys [D, BS], values [BS, D]. Online softmax: m is the largest score so far, l the
    sum of exponentials relative to it, acc the values weighted by them."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp(scores - m_new[:, None])
    alpha = tl.exp(m - m_new)
    acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return m_new, l * alpha + tl.sum(p, 1), acc


@triton.jit
def attention_kernel(
    q, cache, position, partial_acc, partial_ml, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, stride_kv, stride_row, stride_head,
    SPLITS: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token of a row against a share of its cache, the query heads of a key-value head together, by online
    softmax (Milakov and Gimelshein 2018, arXiv:1805.02867); the last program of a row and head puts the shares together
    (Flash-Decoding). Only the new token waits for the kernel before: all others are from steps before."""
    if PDL:
        gdc_launch_dependents()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    G16: tl.constexpr = 16 if G <= 16 else 32
    g = tl.arange(0, G16)
    ds = tl.arange(0, D)
    old = tl.load(position + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(old, SPLITS), 16) * 16
    end = tl.minimum(split * share + share, old)
    base = cache + row.to(tl.int64) * stride_row + kv_head * stride_head
    at = split * share + tl.arange(0, BS)
    keys = tl.load(base + at[None, :] * D + ds[:, None], mask=(at < end)[None, :], other=0.0)
    values = tl.load(base + stride_kv + at[:, None] * D + ds[None, :], mask=(at < end)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    heads = row * (H * D) + (kv_head * G + g)[:, None] * D + ds[None, :]
    query = tl.load(q + heads, mask=(g < G)[:, None], other=0.0)
    m = tl.full((G16,), -1e30, tl.float32)
    l = tl.zeros((G16,), tl.float32)
    acc = tl.zeros((G16, D), tl.float32)
    m, l, acc = attend(query, keys, values, at < end, scale, m, l, acc)
    for s in range(split * share + BS, end, BS):
        at = s + tl.arange(0, BS)
        keys = tl.load(base + at[None, :] * D + ds[:, None], mask=(at < end)[None, :], other=0.0)
        values = tl.load(base + stride_kv + at[:, None] * D + ds[None, :], mask=(at < end)[:, None], other=0.0)
        m, l, acc = attend(query, keys, values, at < end, scale, m, l, acc)
    if split == SPLITS - 1:
        key = tl.load(base + old * D + ds).to(tl.float32)
        score = tl.sum(query.to(tl.float32) * key[None, :], 1) * scale
        m_new = tl.maximum(m, score)
        p = tl.exp(score - m_new)
        alpha = tl.exp(m - m_new)
        l = l * alpha + p
        value = tl.load(base + stride_kv + old * D + ds).to(tl.float32)
        acc = acc * alpha[:, None] + p[:, None] * value[None, :]
        m = m_new
    if SPLITS > 1:
        place = row * K + kv_head
        mine = (place * SPLITS + split) * G16
        tl.store(partial_acc + (mine + g)[:, None] * D + ds[None, :], acc)
        tl.store(partial_ml + 2 * mine + g, m)
        tl.store(partial_ml + 2 * mine + G16 + g, l)
        tl.debug_barrier()
        if tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1:
            m = tl.full((G16,), -1e30, tl.float32)
            for s in range(SPLITS):
                m = tl.maximum(m, tl.load(partial_ml + 2 * (place * SPLITS + s) * G16 + g, cache_modifier=".cg"))
            l = tl.zeros((G16,), tl.float32)
            acc = tl.zeros((G16, D), tl.float32)
            for s in range(SPLITS):
                its = (place * SPLITS + s) * G16
                weight = tl.exp(tl.load(partial_ml + 2 * its + g, cache_modifier=".cg") - m)
                l += weight * tl.load(partial_ml + 2 * its + G16 + g, cache_modifier=".cg")
                piece = tl.load(partial_acc + (its + g)[:, None] * D + ds[None, :], cache_modifier=".cg")
                acc += weight[:, None] * piece
            tl.store(out + heads, (acc / l[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
            tl.store(arrived + place, 0)
    else:
        tl.store(out + heads, (acc / l[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
