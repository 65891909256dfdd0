import torch
def topk_logprobs(logits, k):
    x = logits.float(); lse = torch.logsumexp(x, -1, keepdim=True)
    v, i = torch.sort(x, dim=-1, descending=True, stable=True)
    return (v[:, :k] - lse).contiguous(), i[:, :k].to(torch.int32).contiguous()
def tree_positions(tree, prefix):
    return prefix.unsqueeze(1).to(torch.int64) + tree.depth.to(torch.int64)
def tree_mask_full(tree, prefix, out):
    bs, n = tree.token_ids.shape
    at = 0
    bits = torch.arange(n, device=out.device)
    words = tree.ancestors[:, :, bits // 64] >> (bits % 64) & 1
    for b in range(bs):
        p = int(prefix[b]); block = out[at:at + n * (p + n)].view(n, p + n)
        block[:, :p] = 1
        block[:, p:] = words[b].to(out.dtype)
        at += n * (p + n)
