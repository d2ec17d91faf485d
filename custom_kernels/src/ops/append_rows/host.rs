//! Copies in place.

/// `rows` `[batch, tokens, kv_heads, head_dim]` into `cache` `[batch, kv_heads, capacity, head_dim]` from row `at` on.
pub fn append(cache: &mut [f32], rows: &[f32], cache_shape: [usize; 4], rows_shape: [usize; 4], at: usize) {
    let [_, heads, capacity, head_dim] = cache_shape;
    let tokens = rows_shape[1];
    for (index, row) in rows.chunks_exact(head_dim).enumerate() {
        let (window, token, head) = (index / heads / tokens, index / heads % tokens, index % heads);
        let place = ((window * heads + head) * capacity + at + token) * head_dim;
        cache[place..][..head_dim].copy_from_slice(row);
    }
}
