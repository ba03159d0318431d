// The structs that cross to Python, field by field as the compiler lays them out; `interface.py` compares.
#include <cstddef>

#include "attention/attention.h"
#include "delta/delta.h"
#include "heads/heads.h"
#include "low_rank/low_rank.h"
#include "product/product.h"

namespace {

struct Field {
    const char* name;
    int64_t offset, size;
};

#define FIELD(name) {#name, offsetof(STRUCT, name), sizeof(STRUCT::name)}
#define STRUCT Product
const Field product[] = {
    FIELD(kind_a), FIELD(m), FIELD(n), FIELD(k), FIELD(a), FIELD(a_row), FIELD(a_column), FIELD(kind_b), FIELD(packed),
    FIELD(bias), FIELD(bias_kind), FIELD(out), FIELD(out_kind), FIELD(threads), FIELD(scaled), FIELD(scale_a),
    FIELD(scale_b), FIELD(isa), FIELD(order), FIELD(small_scales), FIELD(common), FIELD(b), FIELD(b_column), FIELD(adds),
    {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT LowRankPart
const Field low_rank_part[] = {FIELD(b), FIELD(rank), FIELD(lo), FIELD(hi), {nullptr, 0, sizeof(STRUCT)}};
#undef STRUCT
#define STRUCT LowRankFactors
const Field low_rank_factors[] = {
    FIELD(a), FIELD(ranks), FIELD(whole), FIELD(parts), FIELD(count), FIELD(scale), {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT LowRank
const Field low_rank[] = {
    FIELD(product), FIELD(x), FIELD(x_row), FIELD(rows_of_x), FIELD(k), FIELD(total), FIELD(out), FIELD(columns),
    FIELD(rows), FIELD(offsets), FIELD(adapters), FIELD(adapter_step), FIELD(count), FIELD(threads), FIELD(isa),
    FIELD(isa_of_few), FIELD(order), {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT Attention
const Field attention[] = {
    FIELD(kind), FIELD(store_kind), FIELD(q), FIELD(k), FIELD(v), FIELD(k_scale), FIELD(v_scale), FIELD(row_start),
    FIELD(context), FIELD(page_table), FIELD(pages), FIELD(page_size), FIELD(sequences), FIELD(heads), FIELD(kv_heads),
    FIELD(dim), FIELD(scale), FIELD(out), FIELD(lse), FIELD(dout), FIELD(dq), FIELD(dk), FIELD(dv), FIELD(threads),
    FIELD(rows), FIELD(single), FIELD(scale_step), FIELD(probabilities), FIELD(window), FIELD(sinks), FIELD(boundaries),
    {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT HeadInputs
const Field head_inputs[] = {
    FIELD(kind), FIELD(tokens), FIELD(heads), FIELD(kv_heads), FIELD(dim), FIELD(q), FIELD(k), FIELD(v),
    FIELD(q_stride), FIELD(k_stride), FIELD(v_stride), FIELD(q_norm), FIELD(k_norm),
    FIELD(norm_kind), FIELD(eps), FIELD(single), FIELD(cosine), FIELD(sine), FIELD(positions), FIELD(slots),
    FIELD(store_k), FIELD(store_v), FIELD(scale_k), FIELD(scale_v), FIELD(form), FIELD(power_of_two),
    FIELD(rotated_q), FIELD(rotated_k), FIELD(threads), {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT Sequences
const Field sequences[] = {
    FIELD(row_start), FIELD(context), FIELD(page_table), FIELD(pages), FIELD(page_size), FIELD(count),
    {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT DeltaRule
const Field delta_rule[] = {
    FIELD(kind), FIELD(key_heads), FIELD(value_heads), FIELD(key_dim), FIELD(value_dim), FIELD(qkv), FIELD(gates),
    FIELD(decay), FIELD(step_bias), FIELD(scale), FIELD(states), FIELD(out), FIELD(threads), FIELD(skip),
    FIELD(least_step), {nullptr, 0, sizeof(STRUCT)},
};
#undef STRUCT
#define STRUCT DeltaGradients
const Field delta_gradients[] = {
    FIELD(key_heads), FIELD(value_heads), FIELD(key_dim), FIELD(value_dim), FIELD(sequences), FIELD(row_start), FIELD(q),
    FIELD(k), FIELD(v), FIELD(dout), FIELD(kept), FIELD(strength), FIELD(dq), FIELD(dk), FIELD(dv), FIELD(dkept),
    FIELD(dstrength), FIELD(threads), FIELD(corrects), {nullptr, 0, sizeof(STRUCT)},
};

}  // namespace

// The fields of a struct, the last one without a name and as large as the struct.
EXPORT const Field* isobit_product_fields() { return product; }
EXPORT const Field* isobit_low_rank_part_fields() { return low_rank_part; }
EXPORT const Field* isobit_low_rank_factors_fields() { return low_rank_factors; }
EXPORT const Field* isobit_low_rank_fields() { return low_rank; }
EXPORT const Field* isobit_attention_fields() { return attention; }
EXPORT const Field* isobit_head_inputs_fields() { return head_inputs; }
EXPORT const Field* isobit_sequences_fields() { return sequences; }
EXPORT const Field* isobit_delta_rule_fields() { return delta_rule; }
EXPORT const Field* isobit_delta_gradients_fields() { return delta_gradients; }
