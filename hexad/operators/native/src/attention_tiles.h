static inline bool tiles_serve(const AttentionTask&, int) { return false; }
static void attend_tiles(const Keys&, int, int, int, uint8_t*) {}
