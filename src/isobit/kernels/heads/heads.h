// What `isobit_head_inputs` reads and writes.
#pragma once

#include "native/native.h"

struct HeadInputs {
    int64_t kind, tokens, heads, kv_heads, dim;
    const void *q, *k, *v;                 // [tokens, heads or kv_heads, dim]
    int64_t q_stride, k_stride, v_stride;  // between tokens
    const void *q_norm, *k_norm;           // [dim], or null
    int64_t norm_kind;                     // of these two
    double eps;
    int64_t single;  // whether norms are float32 inside
    const float *cosine, *sine;
    const int64_t *positions, *slots;
    void *store_k, *store_v;
    float *scale_k, *scale_v;  // null where the cache holds what is written
    int64_t form, power_of_two;  // of codes and scales: E4M3 or INT8
    void *rotated_q, *rotated_k;
    int64_t threads;
};
