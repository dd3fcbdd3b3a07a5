/* Acknowledgements, incarnations, the safe point and the release of inputs, for one epoch on two nodes with k = 2.
 *
 * The source publishes a layer and its manifest; the peer fetches them, makes them durable and says so. Either may crash
 * (losing what was not synced); either may lose its disk (a wipe), the peer then beginning another incarnation.
 *
 * What must hold: once the inputs were released, the layer and the manifest are together on some disk, as long as at most one
 * disk was lost that the source did not know of when it released them.
 *
 * Each of the macros below plants a bug that must break it: check.sh runs the model without and with each.
 *   ACK_EARLY        the peer acknowledges what it received, before it is durable
 *   OLD_ACKS         another incarnation does not void the acknowledgements of the one before
 *   NO_MANIFEST      the safe point does not wait for the manifest
 *   RELEASE_SEALED   inputs are released when the epoch is sealed, not when it is safe
 *   SYNC_UNCHECKED   a failed fsync is taken for a good one
 */

#define LAYER 0
#define MANIFEST 1

bool s_disk[2];            /* durable at the source */
bool s_seen[2];            /* published at the source, not durable yet */
bool p_disk[2];
bool p_seen[2];
bool acked[2];             /* what the source believes of the peer */
byte p_inc = 0;            /* the peer's incarnation; at most two wipes are tried */
byte known_inc = 0;
bool released = false;
byte unknown_losses = 0;   /* disks lost since the release, or lost before it without the source knowing */
byte losses = 0;

mtype = { hello, ack };
chan to_source = [3] of { mtype, byte, byte };   /* kind, file, incarnation */

#define WHOLE(disk) (disk[LAYER] && disk[MANIFEST])

bool p_lied[2];            /* the peer believes it durable, and it is not */

#ifdef SYNC_UNCHECKED
#define SYNC(f) if :: p_disk[f] = true :: p_lied[f] = true fi; p_seen[f] = false
#else
#define SYNC(f) p_disk[f] = true; p_seen[f] = false
#endif

#ifdef RELEASE_SEALED
#define IS_SAFE ((s_disk[LAYER] || s_seen[LAYER]) && (s_disk[MANIFEST] || s_seen[MANIFEST]))
#else
#ifdef NO_MANIFEST
#define IS_SAFE (s_disk[LAYER] && s_disk[MANIFEST] && acked[LAYER])
#else
#define IS_SAFE (s_disk[LAYER] && s_disk[MANIFEST] && acked[LAYER] && acked[MANIFEST])
#endif
#endif

#ifdef ACK_EARLY
#define SAYS(f) (p_disk[f] || p_lied[f] || p_seen[f])
#else
#define SAYS(f) (p_disk[f] || p_lied[f])
#endif

#ifdef OLD_ACKS
#define FORGET skip
#else
#define FORGET acked[LAYER] = false; acked[MANIFEST] = false
#endif


active proctype source() {
    byte f, inc;
    do
    /* The job publishes; after a crash it publishes the same again, as long as there are inputs. */
    :: atomic { !released && !s_disk[LAYER] && !s_seen[LAYER] -> s_seen[LAYER] = true }
    :: atomic { !released && !s_disk[MANIFEST] && !s_seen[MANIFEST] && (s_disk[LAYER] || s_seen[LAYER]) -> s_seen[MANIFEST] = true }
    :: atomic { s_seen[LAYER] -> s_seen[LAYER] = false; s_disk[LAYER] = true }
    :: atomic { s_seen[MANIFEST] -> s_seen[MANIFEST] = false; s_disk[MANIFEST] = true }
    /* Statements of the peer, in order. */
    :: atomic { to_source?hello(f, inc) ->
           known_inc = inc; FORGET;
           if :: !released -> unknown_losses = 0 :: else fi }
    :: atomic { to_source?ack(f, inc) ->
           if :: inc == known_inc -> acked[f] = true :: else fi }
    /* The safe point passes the epoch, and its inputs are let go of. */
    :: atomic { !released && IS_SAFE -> released = true }
    /* It crashes, or loses its disk. */
    :: atomic { s_seen[LAYER] || s_seen[MANIFEST] -> s_seen[LAYER] = false; s_seen[MANIFEST] = false }
    :: atomic { losses < 2 && (s_disk[LAYER] || s_disk[MANIFEST]) ->
           losses++;
           s_disk[LAYER] = false; s_disk[MANIFEST] = false; s_seen[LAYER] = false; s_seen[MANIFEST] = false;
           if :: released -> unknown_losses++ :: else fi }
    od
}

active proctype peer() {
    byte f;
    do
    :: atomic { (s_disk[LAYER] || s_seen[LAYER]) && !p_disk[LAYER] && !p_seen[LAYER] && !p_lied[LAYER] -> p_seen[LAYER] = true }
    :: atomic { (s_disk[MANIFEST] || s_seen[MANIFEST]) && !p_disk[MANIFEST] && !p_seen[MANIFEST] && !p_lied[MANIFEST]
           -> p_seen[MANIFEST] = true }
    :: atomic { p_seen[LAYER] -> SYNC(LAYER) }
    :: atomic { p_seen[MANIFEST] -> SYNC(MANIFEST) }
    :: atomic { nfull(to_source) && SAYS(LAYER) -> to_source!ack(LAYER, p_inc) }
    :: atomic { nfull(to_source) && SAYS(MANIFEST) -> to_source!ack(MANIFEST, p_inc) }
    :: atomic { p_seen[LAYER] || p_seen[MANIFEST] -> p_seen[LAYER] = false; p_seen[MANIFEST] = false }
    :: atomic { losses < 2 && p_inc < 2 && nfull(to_source) ->
           losses++; p_inc++; unknown_losses++;
           p_disk[LAYER] = false; p_disk[MANIFEST] = false; p_seen[LAYER] = false; p_seen[MANIFEST] = false;
           p_lied[LAYER] = false; p_lied[MANIFEST] = false;
           to_source!hello(0, p_inc) }
    od
}

ltl safe { [] ((released && unknown_losses <= 1) -> (WHOLE(s_disk) || WHOLE(p_disk))) }
