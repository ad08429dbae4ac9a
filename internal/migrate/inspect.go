package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lib/pq"

	sqlfiles "outbox-relay/sql"
)

// wantedColumn is what migrate expects of a column, or adds.
type wantedColumn struct {
	name    string
	types   string // those accepted, "|" between them; as format_type writes them, without length
	notNull bool
	// added: migrate adds the column where it is missing. The others are older than migrate, so
	// a table without one of them is somebody else's.
	added bool
	// setDefault: migrate sets schema.sql's default where there is none.
	setDefault bool
}

// The tables as schema.sql makes them; a test compares. Strings may be of any length: what
// counts for the broker is checked event by event.
var (
	eventColumns = []wantedColumn{
		{name: "id", types: "uuid", notNull: true, setDefault: true},
		{name: "aggregate_type", types: "character varying|text", notNull: true},
		{name: "aggregate_id", types: "character varying|text", notNull: true},
		{name: "event_type", types: "character varying|text", notNull: true},
		{name: "payload", types: "jsonb|json|text|bytea", notNull: true},
		{name: "attempts", types: "integer", notNull: true, setDefault: true},
		{name: "created_at", types: "timestamp with time zone", notNull: true, setDefault: true},
		{name: "processed_at", types: "timestamp with time zone"},
		{name: "seq", types: "bigint", notNull: true, added: true},
		{name: "headers", types: "jsonb", added: true},
		{name: "retry_after", types: "timestamp with time zone", added: true},
		{name: "last_error", types: "text", added: true},
		{name: "dead_at", types: "timestamp with time zone", added: true},
	}
	stateColumns = []wantedColumn{
		{name: "singleton", types: "boolean", notNull: true},
		{name: "leader", types: "text"},
		{name: "leader_since", types: "timestamp with time zone"},
		{name: "clean", types: "boolean", notNull: true},
		{name: "deaths", types: "integer", notNull: true},
		{name: "released", types: "bigint", notNull: true},
		{name: "paused_at", types: "timestamp with time zone"},
		{name: "paused_by", types: "text"},
		{name: "last_error", types: "text"},
		{name: "last_error_at", types: "timestamp with time zone"},
	}
	suspectColumns = []wantedColumn{
		{name: "id", types: "uuid", notNull: true},
		{name: "deaths", types: "integer", notNull: true},
		{name: "claimed_at", types: "timestamp with time zone"},
	}
)

// tableFacts are a relation's, as found in the catalogs. The zero value is one that is not there.
type tableFacts struct {
	oid         uint32
	kind        string // pg_class.relkind
	isPartition bool
	persistence string // pg_class.relpersistence
	rowSecurity bool
	schema      string
	owner       string
	owned       bool // our role may alter it
	options     string
	name        string
	columns     []columnFacts
}

type columnFacts struct {
	name, typ  string
	notNull    bool
	identity   string // pg_attribute.attidentity
	hasDefault bool
	comment    string
}

func (t *tableFacts) exists() bool { return t.oid != 0 }

func (t *tableFacts) column(name string) (columnFacts, bool) {
	i := slices.IndexFunc(t.columns, func(c columnFacts) bool { return c.name == name })
	if i < 0 {
		return columnFacts{}, false
	}
	return t.columns[i], true
}

// indexFacts and triggerFacts are those of outbox_events.
type indexFacts struct {
	name, definition string
	valid            bool
}

type triggerFacts struct {
	name, function string
	current        bool // calls outbox_notify once a statement
	disabled       bool
	olderPerRow    bool // notifies on our channel once a row
}

// outboxFacts is everything migrate decides upon.
type outboxFacts struct {
	events, state, suspects, view tableFacts

	indexes    []indexFacts
	triggers   []triggerFacts
	function   string // source of outbox_notify; empty when there is none
	definition string // of the view
	stateRow   bool
	uniqueID   bool // id is a primary key, or as good as one
}

// inspectOutbox reads what the catalogs know of the outbox in the given schema. It takes no lock
// that anybody would notice.
func inspectOutbox(ctx context.Context, s *session, schema string) (*outboxFacts, error) {
	f := &outboxFacts{}
	tables := map[string]*tableFacts{
		"outbox_events":       &f.events,
		"outbox_relay_state":  &f.state,
		"outbox_suspects":     &f.suspects,
		"outbox_dead_letters": &f.view,
	}
	for name, t := range tables {
		if err := t.read(ctx, s, name); err != nil {
			return nil, fmt.Errorf("look at %s: %w", name, err)
		}
		if t != &f.events && t.schema != schema {
			*t = tableFacts{} // that of another outbox, further down the search path
		}
	}
	if err := s.QueryRowContext(ctx, sqlfiles.MigrateSection("function source")).Scan(&f.function); err != nil {
		return nil, fmt.Errorf("look at function outbox_notify: %w", err)
	}
	if f.state.exists() && f.state.kind == "r" {
		if err := s.QueryRowContext(ctx, sqlfiles.MigrateSection("state row")).Scan(&f.stateRow); err != nil {
			return nil, fmt.Errorf("look at outbox_relay_state: %w", err)
		}
	}
	if f.view.kind == "v" {
		err := s.QueryRowContext(ctx, sqlfiles.MigrateSection("view definition"), f.view.oid).Scan(&f.definition)
		if err != nil {
			return nil, fmt.Errorf("look at outbox_dead_letters: %w", err)
		}
	}
	if !f.events.exists() {
		return f, nil
	}
	if err := s.QueryRowContext(ctx, sqlfiles.MigrateSection("unique id"), f.events.oid).Scan(&f.uniqueID); err != nil {
		return nil, fmt.Errorf("look at the primary key: %w", err)
	}
	if err := f.readIndexes(ctx, s); err != nil {
		return nil, fmt.Errorf("look at indexes: %w", err)
	}
	if err := f.readTriggers(ctx, s); err != nil {
		return nil, fmt.Errorf("look at triggers: %w", err)
	}
	return f, nil
}

func (t *tableFacts) read(ctx context.Context, s *session, name string) error {
	err := s.QueryRowContext(ctx, sqlfiles.MigrateSection("table"), name).Scan(&t.oid, &t.kind,
		&t.isPartition, &t.persistence, &t.rowSecurity, &t.schema, &t.owner, &t.owned, &t.options, &t.name)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	rows, err := s.QueryContext(ctx, sqlfiles.MigrateSection("columns"), t.oid)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var c columnFacts
		if err := rows.Scan(&c.name, &c.typ, &c.notNull, &c.identity, &c.hasDefault, &c.comment); err != nil {
			return err
		}
		t.columns = append(t.columns, c)
	}
	return rows.Err()
}

func (f *outboxFacts) readIndexes(ctx context.Context, s *session) error {
	rows, err := s.QueryContext(ctx, sqlfiles.MigrateSection("indexes of"), f.events.oid)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var i indexFacts
		if err := rows.Scan(&i.name, &i.valid, &i.definition); err != nil {
			return err
		}
		f.indexes = append(f.indexes, i)
	}
	return rows.Err()
}

func (f *outboxFacts) readTriggers(ctx context.Context, s *session) error {
	rows, err := s.QueryContext(ctx, sqlfiles.MigrateSection("triggers of"), f.events.oid)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var t triggerFacts
		if err := rows.Scan(&t.name, &t.current, &t.disabled, &t.function, &t.olderPerRow); err != nil {
			return err
		}
		f.triggers = append(f.triggers, t)
	}
	return rows.Err()
}

// index returns an index of outbox_events by name.
func (f *outboxFacts) index(name string) (indexFacts, bool) {
	i := slices.IndexFunc(f.indexes, func(x indexFacts) bool { return x.name == name })
	if i < 0 {
		return indexFacts{}, false
	}
	return f.indexes[i], true
}

// deadUnmarked reports whether an upgrade has yet to mark the older form's dead letters, which it
// has noted in the comment on dead_at.
func (f *outboxFacts) deadUnmarked() bool {
	c, _ := f.events.column("dead_at")
	return strings.HasSuffix(sqlfiles.MigrateSection("add dead_at"), " IS "+pq.QuoteLiteral(c.comment))
}

// conflict returns why what is there cannot become an outbox, or nil.
func (f *outboxFacts) conflict(schema, searchPath string) error {
	e := &f.events
	if e.exists() {
		switch {
		case e.schema != schema:
			return errorf(ErrConflict, "outbox_events is in schema %q, but new tables would go to %q (search_path %s): set search_path to the one that is meant", e.schema, schema, searchPath)
		case e.kind == "p", e.isPartition:
			return errorf(ErrConflict, "outbox_events is partitioned, which is not supported: triggers do not see inserts into partitions, and indexes cannot be built without blocking writers")
		}
	}
	for _, t := range []struct {
		facts   *tableFacts
		columns []wantedColumn
	}{{e, eventColumns}, {&f.state, stateColumns}, {&f.suspects, suspectColumns}} {
		if err := t.facts.conflict(t.columns); err != nil {
			return err
		}
	}
	if e.exists() && !f.uniqueID {
		return errorf(ErrConflict, "table outbox_events: column id is no primary key, and the relay needs it as one")
	}
	if f.view.exists() && f.view.kind != "v" {
		return errorf(ErrConflict, "outbox_dead_letters is there and is no view")
	}
	return nil
}

// conflict compares a table with what is wanted.
func (t *tableFacts) conflict(wanted []wantedColumn) error {
	if !t.exists() {
		return nil
	}
	if t.kind != "r" {
		return errorf(ErrConflict, "%s is there and is no table", t.name)
	}
	if strange := t.strange(wanted); strange != "" {
		return errorf(ErrConflict, "table %s of schema %q is there and is not an outbox of ours: %s. Nothing is changed; search_path in DATABASE_URL names another schema",
			t.name, t.schema, strange)
	}
	for _, w := range wanted {
		c, ok := t.column(w.name)
		switch {
		case !ok:
		case w.notNull && !c.notNull:
			return errorf(ErrConflict, "table %s: column %s may be NULL, which the relay cannot work with: set it NOT NULL", t.name, w.name)
		case w.name == "seq" && c.identity == "":
			return errorf(ErrConflict, "table %s: column seq is not an identity column, and it must number the events in the order of their insertion", t.name)
		}
	}
	return nil
}

// strange lists the columns that a table lacks, or has of another type, where no form of ours ever did.
func (t *tableFacts) strange(wanted []wantedColumn) string {
	var missing, parts []string
	for _, w := range wanted {
		c, ok := t.column(w.name)
		switch {
		case !ok && !w.added:
			missing = append(missing, w.name)
		case ok && !slices.Contains(strings.Split(w.types, "|"), withoutLength(c.typ)):
			parts = append(parts, fmt.Sprintf("column %s is %s, not %s", w.name, c.typ, strings.ReplaceAll(w.types, "|", " or ")))
		}
	}
	switch len(missing) {
	case 0:
	case 1:
		parts = append(parts, "it has no column "+missing[0])
	default:
		parts = append(parts, "it has no columns "+strings.Join(missing, ", "))
	}
	return strings.Join(parts, "; ")
}

// withoutLength turns "character varying(100)" into "character varying".
func withoutLength(typ string) string {
	if before, _, ok := strings.Cut(typ, "("); ok && strings.HasSuffix(typ, ")") {
		return before
	}
	return typ
}

// sameIndex compares two index definitions, of which the server wrote one, by their words.
func sameIndex(a, b string) bool {
	words := func(def string) string {
		_, def, _ = strings.Cut(def, " ON ")
		_, def, _ = strings.Cut(def, "(") // after the table's name, which may have a schema
		def = strings.NewReplacer("(", " ", ")", " ", ",", " ").Replace(strings.ToLower(def))
		return strings.Join(strings.Fields(def), " ")
	}
	return words(a) == words(b)
}
