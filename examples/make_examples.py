"""Write the example data of gptj-ft: clinic notes, question answering and plain text.

Every name, place, note, passage and number in these files is invented for this project by the word
lists and sentence patterns below, and is licensed, like the project, under Apache-2.0. No real patient,
person, company or product is described and nothing here is medical, legal or technical advice.

The generator uses the standard library only and a fixed seed per file, so a second run writes the same
bytes:

    python examples/make_examples.py            # writes next to this file
    python examples/make_examples.py --out DIR  # writes somewhere else

Files: clinic_notes_train.jsonl, clinic_notes_heldout.jsonl, clinic_qa.json, support_qa.jsonl and
field_notes.txt; README.md in this folder says what is in each.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TRAIN_NOTES = 1100
HELDOUT_NOTES = 60
NOTE_WORDS = (50, 90)
QA_PARAGRAPHS_PER_TOPIC = 10
SUPPORT_ROWS = 80
FIELD_PARAGRAPHS = 150

Row = dict[str, str]


# --------------------------------------------------------------------------------------------------
# Clinic notes: word lists
# --------------------------------------------------------------------------------------------------

# How each medication is taken. The note says so; the summary leaves it out.
HOW_TAKEN: Mapping[str, str] = {
    "aciclovir": "five times a day",
    "allopurinol": "once a day",
    "amitriptyline": "at night",
    "amlodipine": "once a day",
    "amoxicillin": "three times a day",
    "apixaban": "twice a day",
    "atorvastatin": "at night",
    "betahistine": "three times a day",
    "bisacodyl": "at night",
    "bisoprolol": "once a day",
    "cefalexin": "twice a day",
    "cetirizine": "once a day",
    "citalopram": "once a day",
    "clarithromycin": "twice a day",
    "colchicine": "twice a day",
    "doxycycline": "once a day",
    "famotidine": "twice a day",
    "fexofenadine": "once a day",
    "flucloxacillin": "four times a day",
    "furosemide": "in the morning",
    "gliclazide": "with breakfast",
    "ibuprofen": "three times a day",
    "levothyroxine": "in the morning",
    "loratadine": "once a day",
    "losartan": "once a day",
    "metformin": "with meals",
    "mirabegron": "once a day",
    "mirtazapine": "at night",
    "montelukast": "at night",
    "naproxen": "twice a day",
    "nitrofurantoin": "twice a day",
    "omeprazole": "before breakfast",
    "paracetamol": "up to four times a day",
    "prochlorperazine": "three times a day",
    "propranolol": "twice a day",
    "ramipril": "once a day",
    "salbutamol": "when needed",
    "senna": "at night",
    "sertraline": "once a day",
    "simvastatin": "at night",
    "sitagliptin": "once a day",
    "solifenacin": "once a day",
    "sumatriptan": "when needed",
    "trimethoprim": "twice a day",
    "valaciclovir": "three times a day",
}


@dataclass(frozen=True)
class Condition:
    """One diagnosis with what a note about it may say; doses of a medication run from low to high."""

    name: str
    symptoms: tuple[str, ...]
    findings: tuple[str, ...]
    medications: Mapping[str, tuple[str, ...]]
    advice: tuple[str, ...]
    referral: str
    course: str  # "acute", "weeks" or "long": which durations, plans and reviews are likely
    feverish: bool = False
    high_pressure: bool = False
    blood_test: bool = False


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "migraine",
        ("throbbing one-sided headaches", "headaches with nausea", "headaches with flashing lights"),
        ("Eye movements and reflexes normal.", "No neck stiffness and no weakness."),
        {
            "sumatriptan": ("50 mg", "100 mg"),
            "propranolol": ("40 mg", "80 mg"),
            "amitriptyline": ("10 mg", "25 mg"),
        },
        ("keep a headache diary", "avoid skipped meals"),
        "neurology",
        "weeks",
    ),
    Condition(
        "tension headache",
        ("a tight band around the head", "dull headaches late in the day"),
        ("Neck muscles tender, otherwise normal.", "Scalp and eyes normal."),
        {
            "paracetamol": ("500 mg", "1000 mg"),
            "ibuprofen": ("200 mg", "400 mg"),
            "amitriptyline": ("10 mg", "25 mg"),
        },
        ("take screen breaks", "do relaxation exercises"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "hypertension",
        ("high blood pressure readings at home", "raised readings on a home monitor"),
        ("Heart sounds normal.", "No ankle swelling."),
        {
            "amlodipine": ("5 mg", "10 mg"),
            "ramipril": ("2.5 mg", "5 mg"),
            "losartan": ("50 mg", "100 mg"),
        },
        ("cut down on salt", "walk every day"),
        "cardiology",
        "long",
        high_pressure=True,
        blood_test=True,
    ),
    Condition(
        "type 2 diabetes",
        ("thirst and tiredness", "raised sugar readings"),
        ("Foot pulses and feeling normal.", "Weight up slightly since last year."),
        {
            "metformin": ("500 mg", "1000 mg"),
            "gliclazide": ("40 mg", "80 mg"),
            "sitagliptin": ("50 mg", "100 mg"),
        },
        ("see the dietitian", "walk every day"),
        "the diabetes team",
        "long",
        blood_test=True,
    ),
    Condition(
        "asthma",
        ("wheeze and a night cough", "chest tightness on exercise"),
        ("Quiet wheeze at both bases.", "Peak flow a little below usual."),
        {"salbutamol": ("100 micrograms", "200 micrograms"), "montelukast": ("10 mg",)},
        ("avoid dust and smoke", "keep a peak flow diary"),
        "the asthma nurse",
        "weeks",
    ),
    Condition(
        "acid reflux",
        ("burning behind the breastbone", "heartburn after meals"),
        ("Abdomen soft with no mass.", "Mild tenderness in the upper abdomen."),
        {"omeprazole": ("20 mg", "40 mg"), "famotidine": ("20 mg", "40 mg")},
        ("avoid late meals", "raise the head of the bed"),
        "gastroenterology",
        "weeks",
    ),
    Condition(
        "gout",
        ("a hot painful big toe", "sudden pain and swelling of the foot"),
        ("Joint red, warm and very tender.", "Swollen joint, skin unbroken."),
        {"colchicine": ("500 micrograms",), "naproxen": ("250 mg", "500 mg")},
        ("rest the foot", "drink plenty of water"),
        "rheumatology",
        "acute",
        blood_test=True,
    ),
    Condition(
        "knee osteoarthritis",
        ("aching knees on the stairs", "knee pain and morning stiffness"),
        ("Both knees creak, full bend.", "Small cool swelling of the knee."),
        {
            "paracetamol": ("500 mg", "1000 mg"),
            "ibuprofen": ("200 mg", "400 mg"),
            "naproxen": ("250 mg", "500 mg"),
        },
        ("do strengthening exercises", "lose some weight"),
        "physiotherapy",
        "long",
    ),
    Condition(
        "low back pain",
        ("an aching lower back", "back pain after lifting"),
        ("Bending limited by pain.", "Leg raise and reflexes normal."),
        {"ibuprofen": ("200 mg", "400 mg"), "naproxen": ("250 mg", "500 mg")},
        ("stay active", "lift with bent knees"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "urinary infection",
        ("burning on passing urine", "frequent and painful urination"),
        ("Urine test positive.", "Lower abdomen slightly tender."),
        {
            "nitrofurantoin": ("50 mg", "100 mg"),
            "trimethoprim": ("200 mg",),
            "cefalexin": ("250 mg", "500 mg"),
        },
        ("drink plenty of water", "bring a urine sample"),
        "urology",
        "acute",
        feverish=True,
    ),
    Condition(
        "tonsillitis",
        ("a sore throat and painful swallowing", "a sore throat with swollen glands"),
        ("Tonsils red and large.", "Tender glands in the neck."),
        {"amoxicillin": ("250 mg", "500 mg"), "clarithromycin": ("250 mg", "500 mg")},
        ("rest and drink fluids", "gargle with salt water"),
        "the ear clinic",
        "acute",
        feverish=True,
    ),
    Condition(
        "chest infection",
        ("a cough with green phlegm", "a cough and mild breathlessness"),
        ("Crackles at one base.", "Coarse breath sounds, no wheeze."),
        {
            "amoxicillin": ("250 mg", "500 mg"),
            "doxycycline": ("100 mg", "200 mg"),
            "clarithromycin": ("250 mg", "500 mg"),
        },
        ("rest and drink fluids", "stop smoking"),
        "the chest clinic",
        "acute",
        feverish=True,
    ),
    Condition(
        "hay fever",
        ("sneezing and itchy eyes", "a runny nose outdoors"),
        ("Eyes pink, nose lining pale.", "Chest clear, nose blocked."),
        {
            "cetirizine": ("5 mg", "10 mg"),
            "loratadine": ("10 mg",),
            "fexofenadine": ("120 mg", "180 mg"),
        },
        ("keep windows closed", "rinse the nose with salt water"),
        "the allergy clinic",
        "weeks",
    ),
    Condition(
        "depression",
        ("low mood and poor sleep", "loss of interest and tiredness"),
        ("Quiet but good eye contact.", "Speech slow, no thoughts of self-harm."),
        {
            "sertraline": ("50 mg", "100 mg"),
            "citalopram": ("10 mg", "20 mg"),
            "mirtazapine": ("15 mg", "30 mg"),
        },
        ("try talking therapy", "walk every day"),
        "the counselling service",
        "long",
    ),
    Condition(
        "anxiety",
        ("worry and a racing heart", "sudden spells of fear"),
        ("Restless, heart sounds normal.", "Hands slightly shaky."),
        {
            "sertraline": ("25 mg", "50 mg"),
            "propranolol": ("10 mg", "40 mg"),
            "citalopram": ("10 mg", "20 mg"),
        },
        ("practise slow breathing", "cut down on coffee"),
        "the counselling service",
        "long",
    ),
    Condition(
        "underactive thyroid",
        ("tiredness and feeling cold", "dry skin and weight gain"),
        ("Thyroid not enlarged.", "Skin dry, reflexes slow."),
        {"levothyroxine": ("25 micrograms", "50 micrograms", "75 micrograms", "100 micrograms")},
        ("repeat the blood test", "take tablets before food"),
        "the hormone clinic",
        "long",
        blood_test=True,
    ),
    Condition(
        "high cholesterol",
        ("raised cholesterol on repeat tests", "high cholesterol results"),
        ("Heart sounds normal.", "No deposits around the eyes."),
        {"atorvastatin": ("20 mg", "40 mg"), "simvastatin": ("20 mg", "40 mg")},
        ("eat less fatty food", "see the dietitian"),
        "the lipid clinic",
        "long",
        blood_test=True,
    ),
    Condition(
        "atrial fibrillation",
        ("a fluttering heartbeat", "palpitations and tiredness"),
        ("Pulse irregular, lungs clear.", "Heart tracing irregular."),
        {"bisoprolol": ("2.5 mg", "5 mg"), "apixaban": ("2.5 mg", "5 mg")},
        ("cut down on alcohol", "keep a pulse diary"),
        "cardiology",
        "weeks",
        blood_test=True,
    ),
    Condition(
        "heart failure",
        ("swollen ankles and breathlessness", "breathlessness on lying flat"),
        ("Fine crackles at both bases.", "Pitting swelling of both ankles."),
        {
            "furosemide": ("20 mg", "40 mg"),
            "bisoprolol": ("2.5 mg", "5 mg"),
            "ramipril": ("2.5 mg", "5 mg"),
        },
        ("weigh daily", "cut down on salt"),
        "cardiology",
        "weeks",
        blood_test=True,
    ),
    Condition(
        "constipation",
        ("hard infrequent stools", "bloating and straining"),
        ("Abdomen soft and full.", "No mass felt."),
        {"senna": ("7.5 mg", "15 mg"), "bisacodyl": ("5 mg", "10 mg")},
        ("eat more fibre", "drink plenty of water"),
        "gastroenterology",
        "weeks",
    ),
    Condition(
        "shingles",
        ("a painful blistering rash", "burning pain and then a rash"),
        ("Blisters in a band on one side.", "Crusting rash on one side of the chest."),
        {"aciclovir": ("800 mg",), "valaciclovir": ("1000 mg",)},
        ("keep the rash covered", "rest at home"),
        "dermatology",
        "acute",
    ),
    Condition(
        "cellulitis",
        ("a red hot lower leg", "spreading redness of the shin"),
        ("Warm red skin with a clear edge.", "Skin swollen, no open wound."),
        {
            "flucloxacillin": ("500 mg", "1000 mg"),
            "doxycycline": ("100 mg", "200 mg"),
            "clarithromycin": ("250 mg", "500 mg"),
        },
        ("keep the leg raised", "mark the edge of the redness"),
        "the day unit",
        "acute",
        feverish=True,
    ),
    Condition(
        "sciatica",
        ("pain from the back to the foot", "shooting leg pain"),
        ("Leg raise painful on one side.", "Power and feeling in the leg normal."),
        {"naproxen": ("250 mg", "500 mg"), "amitriptyline": ("10 mg", "25 mg")},
        ("do stretching exercises", "stay active"),
        "physiotherapy",
        "weeks",
    ),
    Condition(
        "overactive bladder",
        ("sudden urges to pass urine", "getting up often at night to pass urine"),
        ("Urine test clear.", "Abdomen normal, bladder not felt."),
        {"solifenacin": ("5 mg", "10 mg"), "mirabegron": ("25 mg", "50 mg")},
        ("do bladder training", "cut down on coffee"),
        "urology",
        "long",
    ),
    Condition(
        "vertigo",
        ("spinning on turning in bed", "dizzy spells with nausea"),
        ("Head turning brings on dizziness.", "Walking and hearing normal."),
        {"prochlorperazine": ("5 mg", "10 mg"), "betahistine": ("8 mg", "16 mg")},
        ("do balance exercises", "avoid driving"),
        "the ear clinic",
        "acute",
    ),
)

DURATIONS: Mapping[str, tuple[str, ...]] = {
    "acute": ("2 days", "3 days", "4 days", "5 days", "6 days", "10 days", "2 weeks"),
    "weeks": ("2 weeks", "3 weeks", "4 weeks", "5 weeks", "6 weeks", "8 weeks", "3 months"),
    "long": ("6 weeks", "2 months", "3 months", "4 months", "5 months", "6 months", "9 months"),
}
REVIEWS: Mapping[str, tuple[str, ...]] = {
    "acute": ("2 days", "3 days", "5 days", "7 days", "10 days"),
    "weeks": ("10 days", "2 weeks", "3 weeks", "4 weeks", "6 weeks"),
    "long": ("2 weeks", "4 weeks", "6 weeks", "2 months", "3 months"),
}
PLAN_KINDS: Mapping[str, tuple[str, ...]] = {
    "acute": ("start", "start", "start", "switch", "advise", "refer"),
    "weeks": ("start", "start", "increase", "switch", "continue", "advise", "refer"),
    "long": ("start", "increase", "reduce", "switch", "continue", "advise", "refer"),
}
NUMBER_WORDS: Mapping[str, str] = {
    "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven", "8": "eight",
    "9": "nine", "10": "ten",
}  # fmt: skip

CLINICS = ("Harbour Road Clinic", "Moor Lane Practice", "Saltmarsh Health Centre", "Upper Fold Surgery")
SURNAMES = (
    "Alder", "Brook", "Carden", "Dunmore", "Elwick", "Farrow", "Garrow", "Hollis", "Ingram", "Jessop",
    "Kestle", "Lamb", "Marlow", "Norrie", "Orme", "Penrow", "Quill", "Rudd", "Selwick", "Thorne",
)  # fmt: skip
JOBS = (
    "bus driver", "baker", "teacher", "gardener", "carpenter", "cleaner", "librarian", "cook",
    "bookkeeper", "shop worker",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Clinic notes: sentence patterns
# --------------------------------------------------------------------------------------------------

OPENINGS = (
    "{Title} {surname}, aged {age}, came in with {symptom} for {duration}.",
    "Seen today: {a} {age}-year-old {person} with {symptom} for {duration}.",
    "This {age}-year-old {person} reports {symptom} over the last {duration}.",
    "{Title} {surname} is {age} and describes {symptom}. The problem began {duration} ago.",
    "The patient is a {person} of {age} who has had {symptom} for about {duration}.",
    "For the past {duration} this {person}, aged {age}, has had {symptom}.",
    "Clinic visit by {Title} {surname}, {a} {age}-year-old {person}. Main concern is {symptom}, present"
    " for {duration}.",
)
DIAGNOSES = (
    "Impression: {condition}.",
    "Findings fit with {condition}.",
    "Working diagnosis is {condition}.",
    "Most likely {condition}.",
    "Assessed as {condition}.",
    "The picture is that of {condition}.",
)
VITALS = (
    "Blood pressure {systolic}/{diastolic}, pulse {pulse}, temperature {temperature}.",
    "Temperature {temperature}, pulse {pulse}, blood pressure {systolic}/{diastolic}.",
    "Pulse {pulse} and blood pressure {systolic}/{diastolic}.",
    "Observations: temperature {temperature}, pulse {pulse}.",
)
PLAN_NOTES: Mapping[str, tuple[str, ...]] = {
    "start": (
        "Started {drug} {dose} {taken}.",
        "Plan: {drug} {dose} {taken}.",
        "Prescribed {drug} {dose}, to be taken {taken}.",
        "We agreed to begin {drug} {dose} {taken}.",
    ),
    "increase": (
        "Already takes {drug} {other_dose}; this was increased to {dose} {taken}.",
        "The dose of {drug} was raised from {other_dose} to {dose} {taken}.",
        "On {drug} {other_dose} with some benefit, so went up to {dose} {taken}.",
    ),
    "reduce": (
        "Side effects on {drug} {other_dose}, so this was reduced to {dose} {taken}.",
        "The dose of {drug} was lowered from {other_dose} to {dose} {taken}.",
        "Doing well on {drug} {other_dose}; agreed to go down to {dose} {taken}.",
    ),
    "switch": (
        "No benefit from {other_drug}, so changed to {drug} {dose} {taken}.",
        "Stopped {other_drug} and gave {drug} {dose} {taken} instead.",
        "Did not get on with {other_drug}. This was replaced by {drug} {dose} {taken}.",
    ),
    "continue": (
        "To carry on with {drug} {dose} {taken}.",
        "Settled on {drug} {dose} {taken}, no change made.",
        "Already takes {drug} {dose} {taken} and will stay on it.",
    ),
    "advise": (
        "No tablets needed for now; advised to {advice}.",
        "Told to {advice} rather than take tablets.",
        "The plan is to {advice} first, without a prescription.",
    ),
    "refer": (
        "Letter sent to {referral}.",
        "I have asked {referral} to see {him}.",
        "Referred to {referral} for an opinion.",
    ),
}
PLAN_SUMMARIES: Mapping[str, str] = {
    "start": "Started {drug} {dose}",
    "increase": "Increased {drug} to {dose}",
    "reduce": "Reduced {drug} to {dose}",
    "switch": "Switched from {other_drug} to {drug} {dose}",
    "continue": "Continued {drug} {dose}",
    "advise": "Advised to {advice}",
    "refer": "Referred to {referral}",
}
FOLLOW_UP_NOTES: Mapping[str, tuple[str, ...]] = {
    "review": (
        "Review in {interval}.",
        "Asked to come back in {interval}.",
        "We will meet again in {interval}.",
        "Next visit booked in {interval}.",
    ),
    "blood test": ("Blood test in {interval}.", "Bloods to be taken in {interval}."),
    "none": ("No further visit is planned.", "To call only if it gets worse."),
}
FOLLOW_UP_SUMMARIES: Mapping[str, str] = {
    "review": "review in {interval}",
    "blood test": "blood test in {interval}",
    "none": "no review planned",
}
ASIDES = (
    "Works as a {job}.",
    "Used to work as a {job} and is now retired.",
    "Lives with {his} sister.",
    "Lives alone on the second floor.",
    "Does not smoke and drinks little alcohol.",
    "Gave up smoking some years ago.",
    "Walks the dog most mornings.",
    "Sings in a choir and sleeps well.",
    "No known allergies.",
    "Appendix removed as a teenager.",
    "{His} mother had {other_condition}.",
    "No past history of {other_condition}.",
    "Last seen here {other_duration} ago for a routine check.",
    "Back from a holiday of {other_duration} by the sea.",
    "Cares for a neighbour aged {other_age}.",
)
# O opening, F finding, V vital signs, D diagnosis, P plan, R follow-up, A and B asides.
ORDERS = ("OFVADPRB", "OAFVDPR", "OAVFDBPR", "AOFVDPRB", "OFADPVRB", "ODFAVPR", "OVFDRPA", "AOBVFDPR")


@dataclass(frozen=True)
class Visit:
    """What a note and its summary are about."""

    age: int
    woman: bool
    condition: Condition
    duration: str
    plan: str
    drug: str
    dose: str
    other_drug: str
    other_dose: str
    advice: str
    follow_up: str
    interval: str

    @property
    def combination(self) -> tuple[str, ...]:
        """The clinical facts without age and sex: a held-out visit shares them with no training visit."""
        return (self.condition.name, self.duration, plan_summary(self), self.follow_up, self.interval)


def plan_summary(visit: Visit) -> str:
    """The plan as the summary words it."""
    return PLAN_SUMMARIES[visit.plan].format(
        drug=visit.drug,
        dose=visit.dose,
        other_drug=visit.other_drug,
        advice=visit.advice,
        referral=visit.condition.referral,
    )


def draw_medication(rng: random.Random, condition: Condition, plan: str) -> tuple[str, str, str, str, str]:
    """Draw (plan, drug, dose, other drug, other dose); a plan without enough doses or drugs becomes a start."""
    names = list(condition.medications)
    drug, other_drug = rng.sample(names, 2) if len(names) > 1 else (names[0], "")
    doses = condition.medications[drug]
    low = rng.randrange(len(doses) - 1) if len(doses) > 1 else 0
    if plan == "increase" and len(doses) > 1:
        return plan, drug, doses[low + 1], other_drug, doses[low]
    if plan == "reduce" and len(doses) > 1:
        return plan, drug, doses[low], other_drug, doses[low + 1]
    if plan in ("increase", "reduce") or (plan == "switch" and not other_drug):
        plan = "start"
    return plan, drug, rng.choice(doses), other_drug, ""


def draw_visit(rng: random.Random) -> Visit:
    """Draw one visit; every fact is independent of the others except where medicine binds them."""
    condition = rng.choice(CONDITIONS)
    plan, drug, dose, other_drug, other_dose = draw_medication(
        rng, condition, rng.choice(PLAN_KINDS[condition.course])
    )
    follow_ups = ["review", "review", "review"]
    if condition.blood_test:
        follow_ups += ["blood test"]
    if condition.course == "acute":
        follow_ups += ["none"]
    return Visit(
        age=rng.randint(20, 89),
        woman=rng.random() < 0.5,
        condition=condition,
        duration=rng.choice(DURATIONS[condition.course]),
        plan=plan,
        drug=drug,
        dose=dose,
        other_drug=other_drug,
        other_dose=other_dose,
        advice=rng.choice(condition.advice),
        follow_up=rng.choice(follow_ups),
        interval=rng.choice(REVIEWS[condition.course]),
    )


def spoken(rng: random.Random, duration: str) -> str:
    """The duration as the note writes it: now and then with the number as a word."""
    number, unit = duration.split(" ")
    return f"{NUMBER_WORDS[number]} {unit}" if rng.random() < 0.2 else duration


def vital_signs(rng: random.Random, visit: Visit) -> dict[str, str]:
    """Draw vital signs that fit the condition."""
    raised = visit.condition.high_pressure and visit.plan not in ("continue", "reduce")
    return {
        "systolic": str(rng.randrange(150, 172, 2) if raised else rng.randrange(112, 138, 2)),
        "diastolic": str(rng.randrange(92, 102, 2) if raised else rng.randrange(66, 86, 2)),
        "pulse": str(rng.randrange(62, 96, 2)),
        "temperature": f"{rng.randint(375, 384) / 10 if visit.condition.feverish else rng.randint(363, 370) / 10}",
    }


def note_slots(rng: random.Random, visit: Visit) -> dict[str, str]:
    """All words a sentence pattern of the note may ask for, the misleading ones of the asides included."""
    others = [other.name for other in CONDITIONS if other is not visit.condition]
    lengths = sorted({length for choices in DURATIONS.values() for length in choices} - {visit.duration})
    return {
        "Title": rng.choice(("Mrs", "Ms")) if visit.woman else "Mr",
        "surname": rng.choice(SURNAMES),
        "age": str(visit.age),
        "a": "an" if 80 <= visit.age <= 89 else "a",
        "person": "woman" if visit.woman else "man",
        "him": "her" if visit.woman else "him",
        "his": "her" if visit.woman else "his",
        "His": "Her" if visit.woman else "His",
        "condition": visit.condition.name,
        "symptom": rng.choice(visit.condition.symptoms),
        "duration": spoken(rng, visit.duration),
        "drug": visit.drug,
        "dose": visit.dose,
        "taken": HOW_TAKEN[visit.drug],
        "other_drug": visit.other_drug,
        "other_dose": visit.other_dose,
        "advice": visit.advice,
        "referral": visit.condition.referral,
        "interval": spoken(rng, visit.interval),
        "job": rng.choice(JOBS),
        "other_condition": rng.choice(others),
        "other_duration": rng.choice(lengths),
        "other_age": str(rng.randint(20, 89)),
        **vital_signs(rng, visit),
    }


def write_note(rng: random.Random, visit: Visit) -> str:
    """Word the note: a pattern for each sentence, an order of sentences, one or two asides."""
    first_aside, second_aside = rng.sample(ASIDES, 2)
    patterns = {
        "O": rng.choice(OPENINGS),
        "F": rng.choice(visit.condition.findings),
        "V": rng.choice(VITALS),
        "D": rng.choice(DIAGNOSES),
        "P": rng.choice(PLAN_NOTES[visit.plan]),
        "R": rng.choice(FOLLOW_UP_NOTES[visit.follow_up]),
        "A": first_aside,
        "B": second_aside,
    }
    slots = note_slots(rng, visit)
    return " ".join(patterns[letter] for letter in rng.choice(ORDERS)).format(**slots)


def write_summary(visit: Visit) -> str:
    """Word the summary in the house style of the clinics."""
    person = "woman" if visit.woman else "man"
    follow_up = FOLLOW_UP_SUMMARIES[visit.follow_up].format(interval=visit.interval)
    return (
        f"{visit.age}-year-old {person} with {visit.condition.name} for {visit.duration}. "
        f"{plan_summary(visit)}; {follow_up}."
    )


def make_clinic_notes(seed: str) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows); no note and no combination of facts is in both."""
    rng = random.Random(seed)
    heldout: list[Row] = []
    train: list[Row] = []
    notes: set[str] = set()
    heldout_combinations: set[tuple[str, ...]] = set()
    while len(train) < TRAIN_NOTES:
        visit = draw_visit(rng)
        note = write_note(rng, visit)
        wanted = NOTE_WORDS[0] <= len(note.split()) <= NOTE_WORDS[1]
        if not wanted or note in notes or visit.combination in heldout_combinations:
            continue
        notes.add(note)
        rows = heldout if len(heldout) < HELDOUT_NOTES else train
        if rows is heldout:
            heldout_combinations.add(visit.combination)
        rows.append(
            {
                "visit_id": f"V{len(notes):05d}",
                "clinic": rng.choice(CLINICS),
                "note": note,
                "short_summary": write_summary(visit),
            }
        )
    return train, heldout
