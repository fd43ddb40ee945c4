------------------------------ MODULE Delivered ------------------------------
(* How a batch becomes visible exactly once, or at most once. docs/protocol.md explains it, says where each action is  *)
(* in the code, and what the bounds are. A step is one atomic change of one system; a crash may be between any two.    *)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
  Last,         \* incarnation (a checkpoint, or a run) |-> number of its last batch
  Shards,
  Drivers,      \* processes: several at a time are zombies and their successors
  AtMostOnce,   \* the guarantee; FALSE: exactly_once, by Kafka transactions
  MaxClaims, MaxRestarts, MaxExpired, MaxRetries,    \* how often it may happen
  \* the four rules whose absence is a known way to lose or double records:
  Evidence,     \* A: a transaction has ended when the partitions show it, not when the coordinator says so
  LedgerOrder,  \* C: the newer of two decisions is the later one in the ledger, not the one with the later time
  Grant,        \* D: one try of a task may send, by the driver's grant, not each that Spark numbers 0
  LeaderEnd,    \* E: a log ends where its current leader says, not where any answer says
  \* and two more, whose absence this model found:
  EveryStart,   \* each start finishes the newest decision of the ledger, whosever it is, not only a new checkpoint's first
  AsItEnded     \* what hangs in a partition ends as the coordinator ended it, not always as the decision says

Incarnations == DOMAIN Last
None == [no |-> 0]
Parts == {"data", "marker"}     \* a transaction writes rows to one partition, and their marker to another
Row == {r \in [i: Incarnations, b: 0..9, s: Shards]: r.b <= Last[r.i]}

VARIABLES
  claims,       \* of the ledger, so far: the newest one fences all others
  ledger,       \* decisions, in order: [no, i, b, claim, epochs, gaveUp, at]; `at` is the time of the deciding host
  begun,        \* at_most_once: batches that may have sent records
  logged,       \* incarnation |-> batches in Spark's commits/
  coordinator,  \* shard |-> what the coordinator says of its transactional id: [epoch, state]
  open,         \* partition |-> shard |-> what it holds of transactions without an end: {[epoch, i, b]}
  visible,      \* row |-> how often a read_committed reader sees it
  marker,       \* shard |-> its newest visible marker [i, b]: the topic is compacted
  driver,
  restarts, expired, retries,   \* of a broker; of transactions; of tasks
  refused       \* a driver stopped with LEDGER_BEHIND

vars == <<claims, ledger, begun, logged, coordinator, open, visible, marker, driver, restarts, expired, retries, refused>>
stored == <<claims, ledger, begun, logged>>
kafka == <<coordinator, open, visible, marker>>
faults == <<restarts, expired, retries, refused>>

Off == [pc |-> "off"]
Max(a, b) == IF a > b THEN a ELSE b

Init ==
  /\ claims = 0 /\ ledger = <<>> /\ begun = {}
  /\ logged = [i \in Incarnations |-> 0]
  /\ coordinator = [s \in Shards |-> [epoch |-> 0, state |-> "complete"]]
  /\ open = [p \in Parts |-> [s \in Shards |-> {}]]
  /\ visible = [r \in Row |-> 0]
  /\ marker = [s \in Shards |-> None]
  /\ driver = [d \in Drivers |-> Off]
  /\ restarts = 0 /\ expired = 0 /\ retries = 0 /\ refused = FALSE

------------------------------------------------------------------------------
(* What a driver reads. *)

\* After a restart, an answer may come from before: from a leader that does not yet know the log's end.
Ends == IF LeaderEnd \/ restarts = 0 THEN {Len(ledger)} ELSE {Len(ledger), Max(Len(ledger) - 1, 0)}

\* No host's clock agrees with another's. Drawn only if somebody reads it.
Clocks == IF LedgerOrder THEN {0} ELSE {0, 1}
Newer(a, b) == IF LedgerOrder THEN a.no > b.no ELSE a.at > b.at
Of(i, end) == {n \in 1..end: ledger[n].i = i}
Newest(i, end) == IF Of(i, end) = {} THEN None ELSE ledger[CHOOSE n \in Of(i, end): \A m \in Of(i, end): m <= n]
Others(i, end) == {Newest(j, end): j \in Incarnations \ {i}} \ {None}
Earlier(i, end) == IF Others(i, end) = {} THEN None
                   ELSE CHOOSE x \in Others(i, end): \A y \in Others(i, end): x = y \/ ~Newer(y, x)

Clean(s) == \A p \in Parts: open[p][s] = {}
Ending(s) == coordinator[s].state \in {"committing", "aborting"}
Marked(x, s) == marker[s].no > 0 /\ marker[s].i = x.i /\ marker[s].b = x.b
Markers(x, s) == IF LeaderEnd \/ restarts = 0 THEN {Marked(x, s)} ELSE {Marked(x, s), FALSE}
Owner(d) == driver[d].pc # "off" /\ driver[d].claim = claims

Set(d, new) == driver' = [driver EXCEPT ![d] = new]
Stop(d) == Set(d, Off)
Nobody == [s \in Shards |-> 0]
Staging(me, todo) == [pc |-> "stage", claim |-> me.claim, i |-> me.i, b |-> me.b, todo |-> todo, again |-> me.own,
                      epochs |-> Nobody, tries |-> Nobody, attempt |-> Nobody, gaveUp |-> {}]
Logging(me) == [pc |-> "log", claim |-> me.claim, i |-> me.i, b |-> me.b]

------------------------------------------------------------------------------
(* The partitions: a marker ends all that is open of its producer id there, whatever the epoch. *)

End(p, s, commit) ==
  LET rows == open[p][s]
      new == {r \in Row: r.s = s /\ \E t \in rows: t.i = r.i /\ t.b = r.b}
      copies(r) == Cardinality({t \in rows: t.i = r.i /\ t.b = r.b})
      last == CHOOSE t \in rows: \A u \in rows: u.epoch <= t.epoch
  IN /\ open' = [open EXCEPT ![p][s] = {}]
     /\ visible' = IF commit /\ p = "data" THEN [r \in Row |-> IF r \in new THEN visible[r] + copies(r) ELSE visible[r]]
                   ELSE visible
     /\ marker' = IF commit /\ p = "marker" THEN [marker EXCEPT ![s] = [no |-> 1, i |-> last.i, b |-> last.b]] ELSE marker

WriteMarker(p, s) ==
  /\ Ending(s) /\ open[p][s] # {}
  /\ End(p, s, coordinator[s].state = "committing")
  /\ UNCHANGED <<stored, coordinator, driver, faults>>

Complete(s) ==
  /\ Ending(s) /\ Clean(s)
  /\ coordinator' = [coordinator EXCEPT ![s].state = "complete"]
  /\ UNCHANGED <<stored, open, visible, marker, driver, faults>>

\* A coordinator that loads before it knows the leaders completes transactions without writing their markers.
Restart(lost) ==
  /\ restarts < MaxRestarts /\ \A s \in lost: Ending(s)
  /\ restarts' = restarts + 1
  /\ coordinator' = [s \in Shards |-> IF s \in lost THEN [coordinator[s] EXCEPT !.state = "complete"] ELSE coordinator[s]]
  /\ UNCHANGED <<stored, open, visible, marker, driver, expired, retries, refused>>

Aborted(s) == [coordinator EXCEPT ![s] = [epoch |-> @.epoch + 1, state |-> "aborting"]]

Expire(s) ==
  /\ expired < MaxExpired /\ coordinator[s].state = "ongoing"
  /\ expired' = expired + 1 /\ coordinator' = Aborted(s)
  /\ UNCHANGED <<stored, open, visible, marker, driver, restarts, retries, refused>>

\* EndTxn(commit): idempotent; refused once the id has a newer epoch.
Accepted(x, s) == coordinator[s].epoch = x.epochs[s]
EndTxn(x, s) == coordinator' = IF Accepted(x, s) /\ coordinator[s].state = "ongoing"
                               THEN [coordinator EXCEPT ![s].state = "committing"] ELSE coordinator

------------------------------------------------------------------------------
(* The driver: plan_batch *)

\* Claim the ledger, read it, compare it with Spark's log. The last batch may run again: its log entry can be lost.
Start(d, i) ==
  /\ driver[d].pc = "off" /\ claims < MaxClaims /\ claims' = claims + 1
  /\ \E end \in Ends:
       LET b == IF logged[i] > Last[i] THEN Last[i] ELSE logged[i]
           last == Newest(i, end)
           earlier == Earlier(i, end)
           before == IF last = None THEN -1 ELSE last.b
           own == before = b
           theirs == earlier # None /\ (last = None \/ (EveryStart /\ Newer(earlier, last)))
           finish == IF own THEN last ELSE IF theirs THEN earlier ELSE None
           me == [pc |-> IF AtMostOnce THEN "begin" ELSE "recover", claim |-> claims + 1, i |-> i, b |-> b, own |-> own,
                  finish |-> finish, keep |-> IF own /\ EveryStart THEN earlier ELSE None, ended |-> {}, gone |-> {}]
       IN IF before < b - 1 THEN refused' = TRUE /\ UNCHANGED driver ELSE Set(d, me) /\ UNCHANGED refused
  /\ UNCHANGED <<ledger, begun, logged, kafka, restarts, expired, retries>>

\* Commit what was decided ...
Finish(d, s) ==
  LET me == driver[d] IN
  /\ me.pc = "recover" /\ me.finish # None /\ s \notin me.ended
  /\ EndTxn(me.finish, s)
  /\ Set(d, [me EXCEPT !.ended = @ \union {s}, !.gone = IF Accepted(me.finish, s) THEN @ ELSE @ \union {s}])
  /\ UNCHANGED <<stored, open, visible, marker, faults>>

Kept(me, s) == \E x \in {me.finish, me.keep} \ {None}: Accepted(x, s)
Ended(me) == me.pc = "recover" /\ (me.finish = None \/ me.ended = Shards)

\* ... abort what was not ...
AbortOrphan(d, s) ==
  /\ Ended(driver[d]) /\ coordinator[s].state = "ongoing" /\ ~Kept(driver[d], s)
  /\ coordinator' = Aborted(s)
  /\ UNCHANGED <<stored, open, visible, marker, driver, faults>>

\* ... end in each partition what the coordinator forgot there ...
Outcome(t, s) == IF AsItEnded THEN t.epoch = coordinator[s].epoch
                 ELSE \E n \in 1..Len(ledger): ledger[n].epochs[s] = t.epoch
Settle(d, p, s) ==
  /\ Evidence /\ Owner(d) /\ driver[d].pc \in {"recover", "stage", "log"}
  /\ coordinator[s].state = "complete" /\ open[p][s] # {}
  /\ End(p, s, \E t \in open[p][s]: Outcome(t, s))
  /\ UNCHANGED <<stored, coordinator, driver, faults>>

\* ... and then look which decided rows are gone. Evidence of a decision that a later one followed may be compacted away.
Recovered(d) ==
  LET me == driver[d]
      x == me.finish
      finished == me.keep # None /\ Newer(me.keep, x)
      asked == IF x = None \/ finished THEN {} ELSE me.gone
  IN
  /\ Ended(me)
  /\ \A s \in Shards: \/ coordinator[s].state = "ongoing" /\ Kept(me, s)
                      \/ coordinator[s].state = "complete" /\ (Evidence => Clean(s))
  /\ \E found \in SUBSET asked:
       /\ \A s \in asked: (s \in found) \in Markers(x, s)
       /\ LET lost == asked \ found
          IN CASE me.own /\ lost = {} -> Set(d, Logging(me))
               [] me.own -> Set(d, Staging(me, lost))              \* rewrite only these
               [] lost = {} -> Set(d, Staging(me, Shards))
               [] OTHER -> Stop(d)                                 \* EARLIER_BATCH_EXPIRED
  /\ UNCHANGED <<stored, kafka, faults>>

\* at_most_once: from here on, records may be sent; a batch that an earlier start began is given up.
Begin(d) ==
  LET me == driver[d] IN
  /\ me.pc = "begin"
  /\ CASE ~Owner(d) -> Stop(d) /\ UNCHANGED begun
       [] me.own -> Set(d, Logging(me)) /\ UNCHANGED begun
       [] <<me.i, me.b>> \in begun -> Set(d, [Staging(me, {}) EXCEPT !.gaveUp = Shards]) /\ UNCHANGED begun
       [] OTHER -> Set(d, Staging(me, Shards)) /\ begun' = begun \union {<<me.i, me.b>>}
  /\ UNCHANGED <<claims, ledger, logged, kafka, faults>>

------------------------------------------------------------------------------
(* The tasks *)

\* exactly_once: initialise the id, write rows and marker, flush; leave the transaction open.
Prepare(d, s) ==
  LET me == driver[d]
      epoch == coordinator[s].epoch + 1
  IN
  /\ ~AtMostOnce /\ me.pc = "stage" /\ s \in me.todo /\ me.epochs[s] = 0
  /\ coordinator[s].state = "complete" /\ (Evidence => Clean(s))
  /\ coordinator' = [coordinator EXCEPT ![s] = [epoch |-> epoch, state |-> "ongoing"]]
  /\ open' = [p \in Parts |-> [open[p] EXCEPT ![s] = @ \union {[epoch |-> epoch, i |-> me.i, b |-> me.b]}]]
  /\ Set(d, [me EXCEPT !.epochs[s] = epoch])
  /\ UNCHANGED <<stored, visible, marker, faults>>

\* Initialising an id aborts the transaction that is open under it: an earlier try's, or a zombie the other driver's.
TakeOver(d, s) ==
  /\ driver[d].pc = "stage" /\ s \in driver[d].todo /\ driver[d].epochs[s] = 0
  /\ coordinator[s].state = "ongoing"
  /\ coordinator' = Aborted(s)
  /\ UNCHANGED <<stored, open, visible, marker, driver, faults>>

\* at_most_once: send, unless an earlier try of this task may have sent.
Send(d, s) ==
  LET me == driver[d]
      first == IF Grant THEN me.tries[s] = 0 ELSE me.attempt[s] = 0
  IN
  /\ AtMostOnce /\ me.pc = "stage" /\ s \in me.todo /\ me.epochs[s] = 0
  /\ visible' = IF first THEN [visible EXCEPT ![[i |-> me.i, b |-> me.b, s |-> s]] = @ + 1] ELSE visible
  /\ Set(d, [me EXCEPT !.epochs[s] = 1, !.tries[s] = @ + 1, !.attempt[s] = @ + 1,
                       !.gaveUp = IF first THEN @ ELSE @ \union {s}])
  /\ UNCHANGED <<stored, coordinator, open, marker, faults>>

\* A task's result is lost, and it runs again, in the same attempt of its stage or in a new one, which counts from 0.
Retry(d, s) ==
  LET me == driver[d] IN
  /\ retries < MaxRetries /\ me.pc = "stage" /\ me.epochs[s] > 0
  /\ retries' = retries + 1
  /\ \E attempt \in {me.attempt[s], 0}: Set(d, [me EXCEPT !.epochs[s] = 0, !.attempt[s] = attempt])
  /\ UNCHANGED <<stored, kafka, restarts, expired, refused>>

------------------------------------------------------------------------------
(* The driver: commit_batch *)

\* THE line. The ledger refuses a fenced driver, and a second decision of a batch that is no revision of the first.
Decide(d) ==
  LET me == driver[d]
      last == Newest(me.i, Len(ledger))
      epochs == [s \in Shards |-> IF s \in me.todo \/ last = None THEN me.epochs[s] ELSE last.epochs[s]]
      again == last # None /\ last.b >= me.b
  IN
  /\ me.pc = "stage" /\ \A s \in me.todo: me.epochs[s] > 0
  /\ IF ~Owner(d) \/ (again /\ ~(me.again /\ last.b = me.b)) THEN Stop(d) /\ UNCHANGED ledger
     ELSE \E at \in Clocks:
       LET x == [no |-> Len(ledger) + 1, i |-> me.i, b |-> me.b, claim |-> me.claim, epochs |-> epochs, gaveUp |-> me.gaveUp, at |-> at]
       IN /\ ledger' = Append(ledger, x)
          /\ Set(d, IF AtMostOnce THEN Logging(me)
                    ELSE [pc |-> "apply", claim |-> me.claim, i |-> me.i, b |-> me.b, x |-> x, todo |-> me.todo])
  /\ UNCHANGED <<claims, begun, logged, kafka, faults>>

Apply(d, s) ==
  LET me == driver[d]
      left == me.todo \ {s}
  IN
  /\ me.pc = "apply" /\ s \in me.todo
  /\ EndTxn(me.x, s)
  /\ IF ~Accepted(me.x, s) THEN Stop(d)                            \* PROMISE_EXPIRED: the next start rewrites it
     ELSE Set(d, IF left = {} THEN Logging(me) ELSE [me EXCEPT !.todo = left])
  /\ UNCHANGED <<stored, open, visible, marker, faults>>

\* Spark's commits/N, and at once the plan of the next batch, which claims nothing.
Log(d) ==
  LET me == driver[d] IN
  /\ me.pc = "log"
  /\ Evidence => \A s \in Shards: Ending(s) \/ Clean(s)
  /\ logged' = [logged EXCEPT ![me.i] = Max(@, me.b + 1)]
  /\ IF me.b >= Last[me.i] THEN Stop(d) ELSE Set(d, [me EXCEPT !.pc = "next"])
  /\ UNCHANGED <<claims, ledger, begun, kafka, faults>>

NextBatch(d) ==
  LET me == driver[d] IN
  /\ me.pc = "next"
  /\ \E end \in Ends:
       LET last == Newest(me.i, end)
           new == [pc |-> "begin", claim |-> me.claim, i |-> me.i, b |-> me.b + 1, own |-> FALSE]
       IN CASE ~Owner(d) -> Stop(d) /\ UNCHANGED refused
            [] last = None \/ last.b < me.b -> Stop(d) /\ refused' = TRUE
            [] AtMostOnce -> Set(d, new) /\ UNCHANGED refused
            [] OTHER -> Set(d, Staging(new, Shards)) /\ UNCHANGED refused
  /\ UNCHANGED <<stored, kafka, restarts, expired, retries>>

Crash(d) == driver[d].pc # "off" /\ Stop(d) /\ UNCHANGED <<stored, kafka, faults>>

------------------------------------------------------------------------------
Next ==
  \/ \E d \in Drivers:
       \/ \E i \in Incarnations: Start(d, i)
       \/ \E s \in Shards: \/ Finish(d, s) \/ AbortOrphan(d, s) \/ Prepare(d, s) \/ TakeOver(d, s) \/ Send(d, s)
                          \/ Retry(d, s) \/ Apply(d, s) \/ \E p \in Parts: Settle(d, p, s)
       \/ Recovered(d) \/ Begin(d) \/ Decide(d) \/ Log(d) \/ NextBatch(d) \/ Crash(d)
  \/ \E s \in Shards: Complete(s) \/ Expire(s) \/ \E p \in Parts: WriteMarker(p, s)
  \/ \E lost \in SUBSET Shards: Restart(lost)

Spec == Init /\ [][Next]_vars

------------------------------------------------------------------------------
(* What must hold, in every state. *)

Decisions(r) == {n \in 1..Len(ledger): ledger[n].i = r.i /\ ledger[n].b = r.b}

\* A batch counts if and only if its decision is in the ledger: nothing is visible before (at_most_once: before it began).
NothingBeforeItsDecision ==
  \A r \in Row: visible[r] > 0 => IF AtMostOnce THEN <<r.i, r.b>> \in begun ELSE Decisions(r) # {}

NoneDoubled == \A r \in Row: visible[r] <= 1

\* Once Spark logged a batch, each row is visible, or its COMMIT marker is still coming, from the coordinator or from the
\* next start; under at_most_once, it may also be counted as given up.
NoneLost ==
  \A r \in Row: logged[r.i] > r.b =>
    \/ visible[r] > 0
    \/ AtMostOnce /\ \E n \in Decisions(r): r.s \in ledger[n].gaveUp
    \/ /\ coordinator[r.s].state \in {"committing", "complete"}
       /\ \E t \in open["data"][r.s]: t.i = r.i /\ t.b = r.b /\ t.epoch = coordinator[r.s].epoch

LoggedIsDecided == \A r \in Row: logged[r.i] > r.b => Decisions(r) # {}

\* A fenced driver never decides, and batches are decided in order.
OneWriter ==
  \A m, n \in 1..Len(ledger): m < n =>
    /\ ledger[m].claim <= ledger[n].claim
    /\ ledger[m].i = ledger[n].i => ledger[m].b <= ledger[n].b

\* No driver stops because the ledger seems to lack what it holds.
NoFalseAlarm == ~refused
===============================================================================
