/* A suffix automaton and the guesses read from it: draft/automaton.py and suffix.best_first, state for state and bit for bit.
 * Those are the slow twins, and say what everything means.
 *
 * A state's transitions are a list of edges, and all edges lie in one hash table by (state, token). Nothing is ever deleted.
 * Functions that may need memory return a negative number where there is none: the automaton is then not to be used. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_MEMORY = -1 };

typedef struct {
    int64_t window, num_tokens, num_states, num_edges;
    int64_t last, tail_state, tail_size;
    int64_t room_states, room_edges, num_slots; /* allocated; slots are a power of two, at most half of them taken */
    int32_t *length, *link, *first_edge;        /* [states] */
    int64_t *count, *latest, *earlier;          /* [states] */
    int32_t *edge_state, *edge_token, *edge_to, *next_edge; /* [edges] */
    int32_t *slots;                                         /* [num_slots] an edge, or -1 */
} Automaton;

typedef struct {
    int64_t state, size;
} Place;

/* -- memory ------------------------------------------------------------------------------------------------------------ */

/* Whether a list has room for so many now; made: a void pointer of the caller's. */
#define RESIZED(list, count) \
    ((made = realloc((list), (size_t)(count) * sizeof *(list))) != NULL && ((list) = made, 1))

static int room_for_states(Automaton *a, int64_t more) {
    if (a->num_states + more <= a->room_states) return 1;
    const int64_t room = 2 * (a->num_states + more);
    void *made;
    if (room > INT32_MAX) return 0;
    if (!RESIZED(a->length, room) || !RESIZED(a->link, room) || !RESIZED(a->first_edge, room)) return 0;
    if (!RESIZED(a->count, room) || !RESIZED(a->latest, room) || !RESIZED(a->earlier, room)) return 0;
    a->room_states = room;
    return 1;
}

static int64_t slot_of(const Automaton *a, int64_t state, int64_t token) {
    uint64_t key = ((uint64_t)state << 32 ^ (uint64_t)token) * 0x9E3779B97F4A7C15ull;
    int64_t slot = (int64_t)((key ^ key >> 29) & (uint64_t)(a->num_slots - 1));
    for (;; slot = (slot + 1) & (a->num_slots - 1)) {
        const int32_t edge = a->slots[slot];
        if (edge < 0 || (a->edge_state[edge] == state && a->edge_token[edge] == token)) return slot;
    }
}

static int room_for_edges(Automaton *a, int64_t more) {
    const int64_t wanted = a->num_edges + more;
    void *made;
    if (wanted > a->room_edges) {
        const int64_t room = 2 * wanted;
        if (room > INT32_MAX / 2) return 0;
        if (!RESIZED(a->edge_state, room) || !RESIZED(a->edge_token, room)) return 0;
        if (!RESIZED(a->edge_to, room) || !RESIZED(a->next_edge, room)) return 0;
        a->room_edges = room;
    }
    if (2 * wanted <= a->num_slots) return 1;
    int64_t slots = a->num_slots ? a->num_slots : 64;
    while (slots < 4 * wanted) slots *= 2;
    if (!RESIZED(a->slots, slots)) return 0;
    a->num_slots = slots;
    memset(a->slots, 0xff, (size_t)slots * 4);
    for (int64_t edge = 0; edge < a->num_edges; ++edge)
        a->slots[slot_of(a, a->edge_state[edge], a->edge_token[edge])] = (int32_t)edge;
    return 1;
}

void foretell_suffix_close(Automaton *a) {
    free(a->length), free(a->link), free(a->first_edge), free(a->count), free(a->latest), free(a->earlier);
    free(a->edge_state), free(a->edge_token), free(a->edge_to), free(a->next_edge), free(a->slots);
    memset(a, 0, sizeof *a);
}

/* -- growth ------------------------------------------------------------------------------------------------------------ */

static int64_t new_state(Automaton *a, int64_t length, int64_t link, int64_t count, int64_t latest) {
    if (!room_for_states(a, 1)) return OUT_OF_MEMORY;
    const int64_t state = a->num_states++;
    a->length[state] = (int32_t)length, a->link[state] = (int32_t)link, a->first_edge[state] = -1;
    a->count[state] = count, a->latest[state] = latest, a->earlier[state] = 0;
    return state;
}

/* a zeroed automaton becomes the empty one. */
int64_t foretell_suffix_open(Automaton *a, int64_t window) {
    a->window = window;
    if (!room_for_edges(a, 16)) return OUT_OF_MEMORY;
    return new_state(a, 0, -1, 0, 0);
}

static int32_t edge_of(const Automaton *a, int64_t state, int64_t token) { return a->slots[slot_of(a, state, token)]; }

static int64_t leads_to(const Automaton *a, int64_t state, int64_t token) {
    const int32_t edge = edge_of(a, state, token);
    return edge < 0 ? -1 : a->edge_to[edge];
}

static int lead(Automaton *a, int64_t state, int64_t token, int64_t to) {
    if (!room_for_edges(a, 1)) return 0;
    const int64_t slot = slot_of(a, state, token);
    int32_t edge = a->slots[slot];
    if (edge < 0) {
        edge = a->slots[slot] = (int32_t)a->num_edges++;
        a->edge_state[edge] = (int32_t)state, a->edge_token[edge] = (int32_t)token;
        a->next_edge[edge] = a->first_edge[state], a->first_edge[state] = edge;
    }
    a->edge_to[edge] = (int32_t)to;
    return 1;
}

/* old -1: no transition. *stopped: the state at which it stopped, -1 past the root. */
static int point(Automaton *a, int64_t at, int64_t token, int64_t old, int64_t new, int64_t *stopped) {
    while (at >= 0 && leads_to(a, at, token) == old) {
        if (!lead(a, at, token, new)) return 0;
        at = a->link[at];
    }
    *stopped = at;
    return 1;
}

static int64_t split(Automaton *a, int64_t at, int64_t token, int64_t state) {
    const int64_t part = new_state(a, a->length[at] + 1, a->link[state], a->count[state], a->latest[state]);
    if (part < 0) return part;
    for (int32_t edge = a->first_edge[state]; edge >= 0; edge = a->next_edge[edge])
        if (!lead(a, part, a->edge_token[edge], a->edge_to[edge])) return OUT_OF_MEMORY;
    a->link[state] = (int32_t)part;
    int64_t stopped;
    return point(a, at, token, state, part, &stopped) ? part : OUT_OF_MEMORY;
}

static int64_t whole(Automaton *a, int64_t at, int64_t token, int64_t state) {
    return a->length[state] == a->length[at] + 1 ? state : split(a, at, token, state);
}

static int64_t link_in(Automaton *a, int64_t token) {
    int64_t at = a->last;
    const int64_t known = leads_to(a, at, token);
    if (known >= 0) return a->last = whole(a, at, token, known);
    const int64_t fresh = new_state(a, a->length[at] + 1, 0, 0, 0);
    if (fresh < 0 || !point(a, at, token, -1, fresh, &at)) return OUT_OF_MEMORY;
    if (at >= 0) {
        const int64_t other = whole(a, at, token, leads_to(a, at, token));
        if (other < 0) return other;
        a->link[fresh] = (int32_t)other;
    }
    return a->last = fresh;
}

/* -- places ------------------------------------------------------------------------------------------------------------ */

static Place shortened(const Automaton *a, int64_t state, int64_t size, int64_t limit) {
    if (size > limit) {
        size = limit;
        if (a->length[a->link[state]] >= limit) state = a->link[state];
    }
    return (Place){state, size};
}

static int64_t settled(const Automaton *a, Place place) {
    int64_t state = place.state;
    while (state && a->length[a->link[state]] >= place.size) state = a->link[state];
    return state;
}

static Place follow(const Automaton *a, Place place, int64_t token, int64_t limit) {
    int64_t state = settled(a, place), size = place.size, after = leads_to(a, state, token);
    while (state && after < 0) {
        state = a->link[state], size = a->length[state];
        after = leads_to(a, state, token);
    }
    return after < 0 ? (Place){0, 0} : shortened(a, after, size + 1, limit);
}

/* place [2] (state, size), which becomes the one behind the tokens [count]. */
void foretell_suffix_follow(const Automaton *a, int64_t *place, const int64_t *tokens, int64_t count, int64_t limit) {
    Place at = {place[0], place[1]};
    for (int64_t k = 0; k < count; ++k) at = follow(a, at, tokens[k], limit);
    place[0] = at.state, place[1] = at.size;
}

int64_t foretell_suffix_extend(Automaton *a, const int64_t *tokens, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
        if (link_in(a, tokens[k]) < 0) return OUT_OF_MEMORY;
        const Place tail = follow(a, (Place){a->tail_state, a->tail_size}, tokens[k], a->window + 1);
        a->tail_state = tail.state, a->tail_size = tail.size;
        a->num_tokens += 1;
        for (int64_t state = tail.state; state; state = a->link[state]) {
            a->count[state] += 1;
            a->earlier[state] = a->latest[state];
            a->latest[state] = a->num_tokens;
        }
    }
    return 0;
}

void foretell_suffix_repeat(const Automaton *a, int64_t *place) {
    const int64_t before = a->link[a->last];
    Place found = {0, 0};
    if (before > 0)
        found = a->length[before] <= a->window ? (Place){before, a->length[before]}
                                               : shortened(a, a->tail_state, a->tail_size, a->window);
    place[0] = found.state, place[1] = found.size;
}

/* -- guesses ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t times, latest, token, state;
} Way;

static int better_way(const void *one, const void *other) {
    const Way *x = one, *y = other;
    if (x->times != y->times) return x->times > y->times ? -1 : 1;
    if (x->latest != y->latest) return x->latest > y->latest ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

typedef struct {
    double score;
    int64_t order, level, parent, token;
    Place place;
} Guess;

static int before(const Guess *one, const Guess *other) {
    return one->score != other->score ? one->score > other->score : one->order < other->order;
}

static void push(Guess *heap, int64_t count, Guess guess) {
    int64_t at = count;
    for (; at && before(&guess, heap + (at - 1) / 2); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = guess;
}

static Guess pop(Guess *heap, int64_t count) {
    const Guess first = heap[0], moved = heap[count - 1];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < count - 1; at = child) {
        if (child + 1 < count - 1 && before(heap + child + 1, heap + child)) ++child;
        if (!before(heap + child, &moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
    return first;
}

/* The at most width best ways on from a place, in *ways, which is grown: their number, or OUT_OF_MEMORY. *total: how often the
 * texts go on from there at all; *size: of the place that they are ways from. */
static int64_t ways_from(const Automaton *a, Place place, int64_t least, double least_share, int64_t width, Way **ways,
                         int64_t *room, double *total, int64_t *size) {
    int64_t state = settled(a, place), found = 0, sum = 0;
    void *made;
    *size = place.size;
    while (*size >= least && a->first_edge[state] < 0) state = a->link[state], *size = a->length[state];
    if (*size < least) return 0;
    for (int32_t edge = a->first_edge[state]; edge >= 0; edge = a->next_edge[edge]) sum += a->count[a->edge_to[edge]];
    *total = (double)sum;
    const double enough = least_share * *total;
    for (int32_t edge = a->first_edge[state]; edge >= 0; edge = a->next_edge[edge]) {
        const int64_t after = a->edge_to[edge];
        if (!((double)a->count[after] >= enough)) continue;
        if (found == *room) {
            if (!RESIZED(*ways, 2 * *room + 16)) return OUT_OF_MEMORY;
            *room = 2 * *room + 16;
        }
        (*ways)[found++] = (Way){a->count[after], a->latest[after], a->edge_token[edge], after};
    }
    if (found > 1) qsort(*ways, (size_t)found, sizeof **ways, better_way);
    return found < width ? found : width;
}

/* At most size guesses behind place [2]: parents and tokens [size], *score their scores' sum. Their number. */
int64_t foretell_suffix_guesses(const Automaton *a, const int64_t *place, int64_t depth, int64_t size, int64_t width,
                                double least_score, int64_t least_match, int64_t *parents, int64_t *tokens, double *score) {
    Way *ways = NULL;
    Guess *heap = NULL;
    void *made;
    int64_t room_ways = 0, room_heap = 0, num_heap = 0, order = 0, count = 0, level = 0;
    Place at = {place[0], place[1]};
    double reached = 1.0;
    *score = 0.0;
    for (;;) {
        double total = 0.0;
        int64_t from = 0, num_ways = 0;
        if (level < depth)
            num_ways = ways_from(a, at, least_match, least_score / reached, width, &ways, &room_ways, &total, &from);
        if (num_ways < 0) goto failed;
        if (num_heap + num_ways > room_heap) {
            if (!RESIZED(heap, 2 * (num_heap + num_ways))) goto failed;
            room_heap = 2 * (num_heap + num_ways);
        }
        for (int64_t k = 0; k < num_ways; ++k) {
            const Place on = shortened(a, ways[k].state, from + 1, a->window);
            const double share = (double)ways[k].times / total;
            push(heap, num_heap++, (Guess){reached * share, ++order, level + 1, count, ways[k].token, on});
        }
        if (num_heap == 0 || count == size) break;
        const Guess best = pop(heap, num_heap--);
        parents[count] = best.parent, tokens[count] = best.token;
        count += 1, *score += best.score;
        reached = best.score, level = best.level, at = best.place;
    }
    free(ways), free(heap);
    return count;
failed:
    free(ways), free(heap);
    return OUT_OF_MEMORY;
}
