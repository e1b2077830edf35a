"""The one kernel body of the gated delta rule, for Metal, CUDA and (in tests) C++.

It is written in Metal's names; a header per backend supplies them elsewhere: `thread_position_in_grid`,
`thread_index_in_simdgroup`, `simd_shuffle_xor`, `fma`, and `Pack`, an aligned vector, with
`load`, `store` and `widen` (one element of it as float).

A group of 32 lanes works on a few value rows of one head: Lanes lanes share Rows neighbouring rows, each lane
Dk / Lanes state values of every one of them, in registers for the whole run. The values of a lane are chunks of Vec
neighbours, Lanes * Vec apart, so that neighbouring lanes read neighbouring vectors. Inputs are read in rounds of Depth
steps, one round ahead: memory is several steps away.

Compile-time parameters: Dk, Dv, Hk, Hv, Lanes, Rows (at most Dv), Vec, Depth (a power of two, at most Lanes), InT (q,
k, v, y), BetaT, and the macros
    HAS_MASK    mask [B, T]: a False step leaves the state as it is and has y = 0
    STATE_ONLY  lengths [B]: run only so many steps of each row; no q, no y
    ONE_STEP    T is 1: no need to read it
    BRING_NEAR  inputs are brought into the cache Ahead steps before that (a compile-time parameter too)
Inputs: q, k, v, g, beta, state_in as in `reference`, and steps [1] = T. Outputs: y, state_out.

Every sum has a fixed order and every fused multiply-add is written out, so the bits do not depend on the length, on
the cut into calls, on the variant, or on the other rows of the batch.
"""

from __future__ import annotations

BODY = """
    constexpr int Values = Dk / Lanes;
    constexpr int Chunks = Values / Vec;
    constexpr int Sums = 2;  // independent partial sums: a chain of dependent adds is latency

    const int lane = thread_index_in_simdgroup % Lanes;
    const int wanted_row = (thread_position_in_grid.y * (32 / Lanes) + thread_index_in_simdgroup / Lanes) * Rows;
    // All 32 lanes must reach every shuffle. Where rows run out, the last ones are done twice, to the same bits.
    const int row = wanted_row < Dv - Rows ? wanted_row : Dv - Rows;
    const int head = thread_position_in_grid.z % Hv;
    const int key_head = head / (Hv / Hk);
    const int batch = thread_position_in_grid.z / Hv;

    const size_t state_at = ((size_t(batch) * Hv + head) * Dv + row) * Dk + lane * Vec;
    float s[Rows][Values];
    #pragma unroll
    for (int j = 0; j < Rows; ++j) {
      #pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        auto chunk = load<Vec>(state_in + state_at + j * Dk + c * Lanes * Vec);
        #pragma unroll
        for (int i = 0; i < Vec; ++i) s[j][c * Vec + i] = chunk.v[i];
      }
    }

#if ONE_STEP
    constexpr int T = 1;
#else
    const int T = steps[0];
#endif
#if STATE_ONLY
    const int n_steps = lengths[batch] < T ? lengths[batch] : T;
#else
    const int n_steps = T;
#endif
    const size_t start = size_t(batch) * T;
    // Plus zero, but no compiler can tell: known to be the same in all lanes, a value would be moved to a register that
    // all share as soon as it is asked for, and that waits for memory.
    const int nothing = thread_index_in_simdgroup / 32;
    auto k_ = k + (start * Hk + key_head) * Dk + lane * Vec;
    auto v_ = v + (start * Hv + head) * Dv + row;
    auto g_ = g + start * Hv + head + nothing;
    auto beta_ = beta + start * Hv + head + nothing;
#if !STATE_ONLY
    auto q_ = q + (start * Hk + key_head) * Dk + lane * Vec;
    auto y_ = y + (start * Hv + head) * Dv + row;
#endif
#if HAS_MASK
    auto mask_ = mask + start + nothing;
#endif

#if BRING_NEAR
    // Memory is farther away than a round lasts, the cache is not: Ahead steps before their turn, eight lanes each
    // bring near k, q, v, and four each g and beta.
    const int near_part = thread_index_in_simdgroup % 8;
    auto near_ = (const char*)(k_ - lane * Vec + near_part * (Dk / 8));
    int near_step = Hk * Dk * sizeof(InT);
#if !STATE_ONLY
    if (thread_index_in_simdgroup / 8 == 1) near_ = (const char*)(q_ - lane * Vec + near_part * (Dk / 8));
#endif
    if (thread_index_in_simdgroup / 8 == 2) {
      near_ = (const char*)v_;
      near_step = Hv * Dv * sizeof(InT);
    } else if (thread_index_in_simdgroup / 8 == 3) {
      near_ = near_part < 4 ? (const char*)g_ : (const char*)beta_;
      near_step = Hv * (near_part < 4 ? sizeof(float) : sizeof(BetaT));
    }
    near_ += Ahead * near_step;
#endif

    // One round of inputs as they come from memory, and the round before it as numbers. A round is widened first, then
    // the next one is asked for, then the widened one is computed: a GPU waits for all its loads under way when it
    // needs one of them, so none may be asked for between a load and its use. Zero at first: those steps are computed
    // too.
    Pack<InT, Vec> k_raw[Depth][Chunks] = {};
    Pack<InT, 1> v_raw[Depth][Rows] = {};
    Pack<float, 1> g_raw[Depth] = {};
    Pack<BetaT, 1> beta_raw[Depth] = {};
#if !STATE_ONLY
    Pack<InT, Vec> q_raw[Depth][Chunks] = {};
    float out[Rows][Depth];  // a lane's share of the outputs of the last round
    #pragma unroll
    for (int j = 0; j < Rows; ++j) {
      #pragma unroll
      for (int r = 0; r < Depth; ++r) out[j][r] = 0.0f;
    }
#endif
#if HAS_MASK
    Pack<bool, 1> mask_raw[Depth] = {};
#endif

    // Round by round; the first only asks for inputs, and the outputs of a round are summed up in the one after it.
    for (int t0 = -Depth; t0 < n_steps + Depth; t0 += Depth) {
      float k_now[Depth][Values], v_now[Depth][Rows], g_now[Depth], beta_now[Depth];
#if !STATE_ONLY
      float q_now[Depth][Values];
#endif
      #pragma unroll
      for (int r = 0; r < Depth; ++r) {
#if HAS_MASK
        const bool shown = mask_raw[r].v[0];
#else
        constexpr bool shown = true;
#endif
        // A step that is none decays nothing and writes nothing: a branch would keep the steps from overlapping.
        const bool real = shown && t0 >= 0 && t0 + r < n_steps;
        #pragma unroll
        for (int i = 0; i < Values; ++i) {
          k_now[r][i] = shown ? widen(k_raw[r][i / Vec], i % Vec) : 0.0f;
#if !STATE_ONLY
          q_now[r][i] = shown ? widen(q_raw[r][i / Vec], i % Vec) : 0.0f;
#endif
        }
        #pragma unroll
        for (int j = 0; j < Rows; ++j) v_now[r][j] = shown ? widen(v_raw[r][j], 0) : 0.0f;
        g_now[r] = real ? g_raw[r].v[0] : 1.0f;
        beta_now[r] = real ? widen(beta_raw[r], 0) : 0.0f;
      }

      #pragma unroll
      for (int r = 0; r < Depth; ++r) {
        if (t0 + Depth + r < n_steps) {
          #pragma unroll
          for (int c = 0; c < Chunks; ++c) {
            k_raw[r][c] = load<Vec>(k_ + r * (Hk * Dk) + c * Lanes * Vec);
#if !STATE_ONLY
            q_raw[r][c] = load<Vec>(q_ + r * (Hk * Dk) + c * Lanes * Vec);
#endif
          }
          #pragma unroll
          for (int j = 0; j < Rows; ++j) v_raw[r][j] = load<1>(v_ + r * (Hv * Dv) + j);
          g_raw[r] = load<1>(g_ + r * Hv);
          beta_raw[r] = load<1>(beta_ + r * Hv);
#if HAS_MASK
          mask_raw[r] = load<1>(mask_ + r);
#endif
        }
#if BRING_NEAR
        if (t0 + Depth + Ahead + r < n_steps) bring_near(near_ + r * near_step);
#endif
      }
      k_ += Depth * Hk * Dk;
      v_ += Depth * Hv * Dv;
      g_ += Depth * Hv;
      beta_ += Depth * Hv;
#if !STATE_ONLY
      q_ += Depth * Hk * Dk;
#endif
#if HAS_MASK
      mask_ += Depth;
#endif
#if BRING_NEAR
      near_ += Depth * near_step;
#endif

      // A loop that runs once, but no compiler can tell, so none moves what is before it into it: the requests for the
      // next round would come last, to save registers, and each round would start by waiting for memory.
      #pragma unroll 1
      for (int once = T >> 31; once < 1; ++once) {
#if !STATE_ONLY
        // The sums of a round over the lanes, all at once: lanes first trade shares until each holds those of one step.
        const int t_out = t0 - Depth + lane;
        #pragma unroll
        for (int j = 0; j < Rows; ++j) {
          #pragma unroll
          for (int step = 1; step < Depth; step *= 2) {
            const bool upper = lane & step;
            #pragma unroll
            for (int r = 0; r < Depth; r += 2 * step) {
              const float given = simd_shuffle_xor(upper ? out[j][r] : out[j][r + step], step);
              out[j][r] = (upper ? out[j][r + step] : out[j][r]) + given;
            }
          }
          #pragma unroll
          for (int step = Depth; step < Lanes; step *= 2) out[j][0] += simd_shuffle_xor(out[j][0], step);
          if (lane < Depth && t0 >= Depth && t_out < n_steps) y_[size_t(t_out) * (Hv * Dv) + j] = InT(out[j][0]);
        }
#endif

        #pragma unroll
        for (int r = 0; r < Depth; ++r) {
          float read[Rows];
          #pragma unroll
          for (int j = 0; j < Rows; ++j) {
            float sum[Sums] = {0.0f, 0.0f};
            #pragma unroll
            for (int i = 0; i < Values; ++i) sum[i % Sums] = fma(s[j][i], k_now[r][i], sum[i % Sums]);
            read[j] = sum[0] + sum[1];
          }
          #pragma unroll
          for (int step = 1; step < Lanes; step *= 2) {
            #pragma unroll
            for (int j = 0; j < Rows; ++j) read[j] += simd_shuffle_xor(read[j], step);
          }
          // While the shuffles are under way: the outputs of the step before, and the decay.
          #pragma unroll
          for (int j = 0; j < Rows; ++j) {
#if !STATE_ONLY
            if (r > 0) {
              float sum[Sums] = {0.0f, 0.0f};
              #pragma unroll
              for (int i = 0; i < Values; ++i) sum[i % Sums] = fma(s[j][i], q_now[r > 0 ? r - 1 : 0][i], sum[i % Sums]);
              out[j][r > 0 ? r - 1 : 0] = sum[0] + sum[1];
            }
#endif
            #pragma unroll
            for (int i = 0; i < Values; ++i) s[j][i] *= g_now[r];
          }
          #pragma unroll
          for (int j = 0; j < Rows; ++j) {
            const float delta = fma(-g_now[r], read[j], v_now[r][j]) * beta_now[r];
            #pragma unroll
            for (int i = 0; i < Values; ++i) s[j][i] = fma(k_now[r][i], delta, s[j][i]);
          }
        }
#if !STATE_ONLY
        #pragma unroll
        for (int j = 0; j < Rows; ++j) {
          float sum[Sums] = {0.0f, 0.0f};
          #pragma unroll
          for (int i = 0; i < Values; ++i) sum[i % Sums] = fma(s[j][i], q_now[Depth - 1][i], sum[i % Sums]);
          out[j][Depth - 1] = sum[0] + sum[1];
        }
#endif
      }
    }

    #pragma unroll
    for (int j = 0; j < Rows; ++j) {
      #pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        Pack<float, Vec> chunk;
        #pragma unroll
        for (int i = 0; i < Vec; ++i) chunk.v[i] = s[j][c * Vec + i];
        store(state_out + state_at + j * Dk + c * Lanes * Vec, chunk);
      }
    }
"""
