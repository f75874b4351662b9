"""
Containers of low-bit codes, one file each; a file's name is the container's, with underscores.

Every file has the same functions. *Codes* are numbers of the grid, one per weight; `qdata` is what a
[`~trl_qarl.quantization.tensors.LowBitTensor`] holds of them.

| function | what it does |
|---|---|
| `pack(codes)` | `qdata` of codes `(N, K)` |
| `unpack(qdata, dtype)` | the codes again, `(N, K)` in `dtype` |
| `in_features(qdata)` | `K` |
| `count_flips(before, after)` | number of codes that differ between two `qdata`, 0-d int64 |
| `to_checkpoint(qdata, scale)` | tensors under compressed-tensors' names, without the layer's prefix |
| `from_checkpoint(tensors)` | `qdata` and `scale` of these tensors, without a copy where the layouts agree |

`int4_zero_points` and `int8_zero_points` have zero points beside `scale`, and `nvfp4` a divisor.
"""
